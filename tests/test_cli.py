"""The command line: options declared once, impossible ones refused in one line, secrets never by flag."""

from pathlib import Path

import pytest

from logprobd.offline.settings import ScoreSettings
from logprobd.settings import SECRETS, ModelSettings, ServeSettings
from running import run_cli, run_python


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.parametrize(
    ("command", "settings"), [("serve", ServeSettings), ("score", ScoreSettings), ("check", ModelSettings)]
)
def test_help_has_a_line_for_every_option(command: str, settings: type[ModelSettings]) -> None:
    text = " ".join(run_cli(command, "--help", COLUMNS="500").stdout.split())

    for name, field in settings.model_fields.items():
        if name not in SECRETS:
            assert f"{flag(name)} " in text
            assert field.description is not None
            assert f"{field.description} (LOGPROBD_{name.upper()})" in text


def test_the_version_is_printed() -> None:
    assert run_cli("--version").stdout.startswith("logprobd 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--max-batch-tokens", "0"], "--max-batch-tokens"),
        (["serve", "--precision", "int8"], "--precision"),
        (["serve", "--devices", "tpu"], "--devices"),
        (["serve", "--devices", "auto,cpu"], "--devices"),
        (["serve", "--devices", "cpu+cuda:0"], "--devices"),
        (["serve", "--devices", "cuda:0+cuda:0"], "twice"),
        (["serve", "--request-timeout", "0"], "--request-timeout"),
        (["serve", "--log-format", "xml"], "--log-format"),
        (["serve", "--host", "0.0.0.0"], "--no-auth"),
        (["serve", "--host", "example.org"], "LOGPROBD_API_KEY"),
        (["serve", "--unknown", "1"], "--unknown"),
        (["serve", "--api-key", "secret"], "--api-key"),
        (["serve", "--max-batch", "1"], "--max-batch"),
        (["check", "--port", "1"], "--port"),
        (["dance"], "dance"),
        ([], "command"),
    ],
)
def test_impossible_options_refuse_to_start_in_one_line(arguments: list[str], message: str) -> None:
    result = run_cli(*arguments)

    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_an_unknown_variable_refuses_to_start() -> None:
    result = run_cli("serve", LOGPROBD_PROT="8001")

    assert result.returncode == 2
    assert "LOGPROBD_PROT" in result.stderr


def test_variables_are_options_and_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGPROBD_PORT", "8001")
    monkeypatch.setenv("LOGPROBD_MAX_BATCH_TOKENS", "77")
    settings = ServeSettings(port=8002)

    assert settings.port == 8002
    assert settings.max_batch_tokens == 77


def test_several_keys_are_comma_separated_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGPROBD_API_KEY", "old, new")
    settings = ServeSettings(host="0.0.0.0")

    assert settings.api_keys == ("old", "new")
    assert "old" not in repr(settings)


def test_serving_does_not_import_torch_or_transformers() -> None:
    script = "import sys, logprobd.cli; print([m for m in ('torch', 'transformers') if m in sys.modules])"

    assert run_python(script) == "[]"


def test_check_says_how_a_model_would_be_served(tiny_folder: Path) -> None:
    result = run_cli("check", "--model", str(tiny_folder))

    assert result.returncode == 0, result.stderr
    assert "shared (every layer attends over the prefix tree)" in result.stdout
    assert "against the model's own forward" in result.stdout
    assert "0-1: attends over the tree" in result.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "pickled weights"),
        ("model.pt", "use_safetensors=False"),
        ("notes.txt", "no *.safetensors"),
    ],
)
def test_check_refuses_a_folder_without_safetensors(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"")
    result = run_cli("check", "--model", str(tmp_path))

    assert result.returncode == 1
    assert message in result.stderr


def test_check_refuses_what_does_not_exist() -> None:
    result = run_cli("check", "--model", "./nowhere")

    assert result.returncode == 1
    assert "does not exist" in result.stderr
