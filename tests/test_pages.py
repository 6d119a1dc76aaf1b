"""The pages on deployment: their commands are run, and what this machine cannot run names only what there is."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dockerfile import values
from logprobd.cli import build_parser
from logprobd.plan_settings import PlanSettings
from logprobd.settings import ENV_PREFIX, ServeSettings
from pages import PAGES, all_commands, commands, page, run
from running import ROOT

# Programs that need an engine, a cluster or a server that no machine of the tests has.
CANNOT_RUN = ("docker", "helm", "kubectl apply", "kubectl get", "kubectl --namespace", "logprobd serve")
QWEN3_8B = (
    '{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, '
    '"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, '
    '"tie_word_embeddings": false, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"}'
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hub's cache with the configuration of the page's example, as huggingface_hub lays it out."""
    home = tmp_path_factory.mktemp("hub")
    model, revision = home / "hub" / "models--Qwen--Qwen3-8B", "0" * 40
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    (model / "snapshots" / revision).mkdir(parents=True)
    (model / "snapshots" / revision / "config.json").write_text(QWEN3_8B)
    return home


def test_the_plans_print_what_the_page_says(hub: Path, tmp_path: Path) -> None:
    shown = re.findall(r"```sh\n(logprobd plan .*?)\n```\n```\n(.*?)```", page("tuning"), re.DOTALL)

    assert len(shown) == 2
    for command, output in shown:
        assert run(command, tmp_path, HF_HOME=str(hub), HF_HUB_OFFLINE="1") == output


def test_every_plan_runs(hub: Path, tmp_path: Path) -> None:
    for command in all_commands("logprobd plan"):
        assert "scored tokens/s" in run(command, tmp_path, HF_HOME=str(hub), HF_HUB_OFFLINE="1")


def test_the_keys_are_written_where_compose_reads_them(tmp_path: Path) -> None:
    (tmp_path / "deploy").mkdir()
    (command,) = all_commands("umask")
    run(command, tmp_path)
    written = dict(line.split("=") for line in (tmp_path / "deploy" / ".env").read_text().splitlines())
    asked = re.findall(r"\$\{(\w+):\?", (ROOT / "deploy" / "compose.yaml").read_text())

    assert set(written) == set(asked)
    assert len({*written.values()}) == 3
    assert (tmp_path / "deploy" / ".env").stat().st_mode & 0o077 == 0
    assert "deploy/.env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
def test_kustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    overlays = list(all_commands("kubectl kustomize"))

    assert len(overlays) == 2
    assert all("kind: Deployment" in run(command, tmp_path) for command in overlays)


def test_every_command_is_run_or_cannot_be() -> None:
    # In other tests, by the same lines.
    elsewhere = ("curl", "METRICS_KEY=", "kubectl create secret", "promtool", "logprobd check")
    run_here = (*elsewhere, "logprobd plan", "umask", "kubectl kustomize")
    others = [command for name in PAGES for command in commands(name) if not command.startswith(run_here)]

    assert [command for command in others if not command.startswith(CANNOT_RUN)] == []


def test_every_path_that_is_named_is_there() -> None:
    for name in PAGES:
        linked = re.findall(r"\]\((?!http)([^)#]+)\)", page(name))
        named = re.findall(r"(?<![\w/.])deploy/[\w./-]*[\w-]", "\n".join(commands(name)))
        assert all((ROOT / "docs" / target).exists() for target in linked), name
        assert all((ROOT / target).exists() for target in named if not target.endswith(".env")), name


def test_every_variable_and_option_that_is_named_is_one() -> None:
    fields = set(ServeSettings.model_fields) | set(PlanSettings.model_fields)
    for name in PAGES:
        variables = set(re.findall(rf"\b{ENV_PREFIX}(?!NAME\b)([A-Z_]+[A-Z])\b", page(name)))
        options = set(re.findall(r"`--([a-z-]+)", page(name)))
        assert {variable.lower() for variable in variables} <= fields, name
        assert {option.replace("-", "_") for option in options} <= fields | {"publish", "env", "shm_size"}, name


def test_containers_are_run_with_ports_and_options_of_the_image() -> None:
    runs = [shlex.split(command) for command in all_commands("docker run")]
    for words in runs:
        published = words[words.index("--publish") + 1]
        image = next(index for index, word in enumerate(words) if word.startswith("logprobd:"))
        assert published.endswith(f":{values('EXPOSE')[0]}")
        build_parser().parse_args(["serve", *words[image + 1 :]])

    assert len(runs) == 6


def test_services_are_started_with_options_that_there_are() -> None:
    started = [shlex.split(command)[1:] for command in all_commands("logprobd serve")]

    assert [ServeSettings(devices=build_parser().parse_args(words).devices).devices for words in started]
    assert len(started) == 3


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker command, which would parse its options, is here")
def test_docker_knows_the_options() -> None:
    """With nothing at the other end, docker parses a command and then finds no engine."""
    nowhere = os.environ | {"DOCKER_HOST": "unix:///nowhere"}
    for command in all_commands("docker build", "docker run"):
        result = subprocess.run(
            shlex.split(command), env=nowhere, cwd=ROOT, capture_output=True, text=True, check=False
        )

        assert "docker daemon" in result.stderr, result.stderr
