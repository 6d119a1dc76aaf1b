"""What imports what: the direction of the layers, the owners of heavy libraries, and the client's lightness."""

import ast
import itertools
import tomllib
from pathlib import Path

import pytest

import logprobd
import logprobd_client
from running import ROOT, run_python

SERVICE = ROOT / "service" / "logprobd"

# Higher imports lower, never the other way round.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"offline.score"},
    {"offline.workers", "offline.remote", "offline.output"},
    {"offline.journal", "offline.survey"},
    {"offline.batches", "offline.files"},
    {"offline.parquet"},
    {"offline.rows"},
    {"offline.failures", "offline.progress"},
    {"app"},
    {"auth", "logs"},
    {"service"},
    {"responses", "dialects.native", "batcher"},
    {"waiting", "supervisor", "schemas", "tokenizer"},
    {"engine.check"},
    {"engine.worker"},
    {"engine.memory"},
    {"engine.selftest"},
    {"engine.scorer"},
    {"engine.layouts", "engine.answers"},
    {"engine.attention", "engine.selective", "engine.head", "engine.model", "engine.rope"},
    {"engine.nodes", "engine.flex", "engine.cache", "engine.gguf"},
    {"engine.packing", "engine.blocks", "engine.budget", "engine.meter"},
    {"messages", "errors"},
    {"settings"},
    {"sequences"},
    {"__init__", "dialects.__init__", "engine.__init__", "offline.__init__"},
]

OWNERS: dict[str, str | tuple[str, ...]] = {
    "torch": "engine.",
    "transformers": "engine.",
    "gguf": "engine.gguf",
    "psutil": "engine.meter",
    "fastapi": ("app", "responses"),
    "uvicorn": "cli",
    "tokenizers": "tokenizer",
    "orjson": ("dialects.", "responses", "offline."),
    "pyarrow": "offline.parquet",
    "httpx": "offline.remote",
    "tqdm": "offline.progress",
    "pydantic": ("schemas", "settings", "cli", "dialects."),
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
    heavy = ("torch", "transformers", "fastapi", "pydantic", "uvicorn", "tokenizers", "logprobd")
    script = f"import sys, logprobd_client; print([name for name in {heavy} if name in sys.modules])"

    assert run_python(script) == "[]"


def test_versions_agree_everywhere() -> None:
    service = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "clients" / "pyproject.toml").read_text())["project"]

    assert service["version"] == client["version"] == logprobd.__version__ == logprobd_client.__version__
    assert f"## {service['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_for_the_tests() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]

    assert {requirement.partition(">=")[0].lower() for requirement in wanted if "[" not in requirement} <= pinned
