"""What imports what: the direction of the layers, the owners of heavy libraries, and the client's lightness."""

import ast
import itertools
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import logprobd
import logprobd_client
from running import ROOT, run_python

SERVICE = ROOT / "service" / "logprobd"

# Higher imports lower, never the other way round.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"options"},
    {"offline.score"},
    {"offline.workers", "offline.remote", "offline.output"},
    {"offline.journal", "offline.survey"},
    {"offline.batches", "offline.files"},
    {"offline.parquet"},
    {"offline.rows"},
    {"offline.settings", "offline.failures", "offline.progress"},
    {"app"},
    {"dialect_routes"},
    {"scoring"},
    {"service", "auth", "logs"},
    {"local"},
    {"large_bodies", "metrics", "timings", "tracing", "requests", "responses"},
    {"batcher", "body_process"},
    {"admission"},
    {"dialects.parsing"},
    {"dialects.binary", "dialects.completions", "dialects.vllm", "dialects.sglang"},
    {"dialects.whole", "dialects.flat"},
    {"dialects.native"},
    {"dialects.plans", "supervisor"},
    {"waiting", "worker", "schemas", "tokenizer", "plan"},
    {"own_process", "plan_settings"},
    {"engine.check"},
    {"engine.worker"},
    {"engine.preparing"},
    {"engine.memory", "engine.group"},
    {"engine.selftest"},
    {"engine.scorer"},
    {"engine.layouts", "engine.answers"},
    {"engine.attention", "engine.selective", "engine.head", "engine.model", "engine.rope"},
    {"engine.nodes", "engine.flex", "engine.cache", "engine.gguf"},
    {"engine.packing", "engine.blocks", "engine.budget", "engine.meter", "engine.ranks"},
    {"messages", "errors"},
    {"settings", "shape"},
    {"sequences"},
    {"__init__", "dialects.__init__", "engine.__init__", "offline.__init__"},
]

OWNERS: dict[str, str | tuple[str, ...]] = {
    "torch": "engine.",
    "transformers": "engine.",
    "gguf": "engine.gguf",
    "huggingface_hub": "plan",
    "psutil": "engine.meter",
    "fastapi": ("app", "responses", "scoring", "dialect_routes"),
    "prometheus_client": ("metrics", "app"),
    "opentelemetry": "tracing",
    "safetensors": ("engine.", "dialects.binary"),
    "uvicorn": "cli",
    "tokenizers": "tokenizer",
    "orjson": ("dialects.", "responses", "offline."),
    "pyarrow": "offline.parquet",
    "httpx": "offline.remote",
    "tqdm": "offline.progress",
    "pydantic": ("schemas", "settings", "plan_settings", "offline.settings", "options", "cli", "dialects."),
    "pydantic_settings": "settings",
}


def modules() -> dict[str, Path]:
    return {".".join(path.relative_to(SERVICE).with_suffix("").parts): path for path in sorted(SERVICE.rglob("*.py"))}


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def layer_of(module: str) -> int:
    return next(level for level, layer in enumerate(LAYERS) if module in layer)


def test_every_module_has_its_place() -> None:
    placed = set().union(*LAYERS)

    assert placed == set(modules())


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module: str) -> None:
    known = modules()
    ours = {name.removeprefix("logprobd.") for name in imports_of(known[module]) if name.startswith("logprobd.")}

    for imported in ours & set(known):
        assert layer_of(imported) > layer_of(module), f"{module} imports {imported}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_heavy_libraries_have_one_owner(module: str) -> None:
    used = {name.partition(".")[0] for name in imports_of(modules()[module])}

    for library in used & set(OWNERS):
        assert module.startswith(OWNERS[library]), f"{module} imports {library}"


def test_only_the_check_command_reaches_into_the_engine() -> None:
    reaching = {
        module
        for module, path in modules().items()
        if not module.startswith("engine.") and any(name.startswith("logprobd.engine") for name in imports_of(path))
    }

    assert reaching == {"cli"}


def test_service_and_client_never_import_each_other() -> None:
    client = list((ROOT / "clients" / "logprobd_client").rglob("*.py"))

    assert client
    assert not [path for path in client if any(name.partition(".")[0] == "logprobd" for name in imports_of(path))]
    assert not [p for p in modules().values() if any(name.startswith("logprobd_client") for name in imports_of(p))]


def test_the_client_is_light() -> None:
    heavy = ("torch", "tqdm", "trl", "transformers", "fastapi", "pydantic", "uvicorn", "tokenizers", "logprobd")
    script = f"import sys, logprobd_client.wire_binary; print([name for name in {heavy} if name in sys.modules])"

    assert run_python(script) == "[]"


def test_installing_the_client_brings_nothing_heavy() -> None:
    brought = closure_of("logprobd-client")

    assert {"logprobd-client", "httpx", "numpy", "safetensors", "anyio", "certifi"} <= brought
    assert not brought & {"torch", "transformers", "tokenizers", "pydantic", "logprobd", "trl", "tqdm"}
    assert len(brought) < 15, sorted(brought)


def closure_of(distribution: str) -> set[str]:
    """A distribution and all that installing it without extras brings, by the metadata of what is installed.

    The first one's is read from its pyproject.toml, so that an installation made before a change does not count.
    """
    project = tomllib.loads((ROOT / "clients" / "pyproject.toml").read_text())["project"]
    found, new = {distribution}, project["dependencies"]
    while new:
        wanted = [Requirement(line) for line in new]
        names = {canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})}
        new = list(itertools.chain(*(metadata.requires(name) or [] for name in names - found)))
        found |= names
    return found


def test_the_client_says_that_it_is_typed() -> None:
    assert (ROOT / "clients" / "logprobd_client" / "py.typed").exists()


def test_versions_agree_everywhere() -> None:
    service = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "clients" / "pyproject.toml").read_text())["project"]

    assert service["version"] == client["version"] == logprobd.__version__ == logprobd_client.__version__
    assert f"## {service['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_for_the_tests() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    projects = [
        tomllib.loads((ROOT / path).read_text())["project"] for path in ("pyproject.toml", "clients/pyproject.toml")
    ]
    wanted = [
        requirement
        for project in projects
        for requirement in [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    ]

    assert {requirement.partition(">=")[0].lower() for requirement in wanted if "[" not in requirement} <= pinned


# The first versions without an advisory that matters to a service like this one.
FIRST_SAFE = {
    "h11": "0.16",  # CVE-2025-43859: request smuggling through malformed chunks
    "orjson": "3.9.15",  # CVE-2024-27454: endless recursion in nested JSON
    "pyarrow": "14.0.1",  # CVE-2023-47248: code run by a Parquet file
    "pydantic": "2.4.0",  # CVE-2024-3772: slow regular expressions
    "starlette": "1.0.1",  # hosts and ranges
    "torch": "2.6",  # CVE-2025-32434: code run by weights_only
    "transformers": "4.53",  # CVE-2025-5197 and its like: slow regular expressions
}


@pytest.mark.parametrize("name", sorted(FIRST_SAFE))
def test_floors_are_above_known_advisories(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    (floor,) = (requirement.partition(">=")[2] for requirement in wanted if requirement.startswith(name + ">="))

    assert Version(floor) >= Version(FIRST_SAFE[name])
