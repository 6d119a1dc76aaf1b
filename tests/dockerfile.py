"""The Dockerfile's own instructions, run in a folder: what `docker build` would do, where there is no Docker engine.

All stages share one root folder, under which every absolute path of the image is moved, so that COPY --from and bind
mounts between stages find what they name in place. Steps that change the machine (apt-get, useradd) are left out.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

from running import ROOT

FOLDERS = re.compile(r"(?<![\w./-])/(?=(?:opt|src|convert|dist|cache|tmp)(?:/|\b))")
CHANGES_THE_MACHINE = ("apt-get", "useradd")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `RUN`, its flags (`--mount=...`), and the rest."""

    name: str
    flags: tuple[str, ...]
    value: str


def instructions() -> list[Instruction]:
    structure = DockerfileParser(path=str(ROOT / "Dockerfile")).structure
    return [parse(step["instruction"], step["value"]) for step in structure if step["instruction"] != "COMMENT"]


def parse(name: str, text: str) -> Instruction:
    flags = re.match(r"(?:--\S+\s+)*", text)
    assert flags is not None, "the pattern matches anything. This is a bug."
    return Instruction(name, tuple(flags[0].split()), text[flags.end() :])


def values(name: str) -> list[str]:
    return [step.value for step in instructions() if step.name == name]


def environment_of_image() -> dict[str, str]:
    """The variables that ENV sets in the last stage, PATH aside."""
    last = max(index for index, step in enumerate(instructions()) if step.name == "FROM")
    pairs = [pair for step in instructions()[last:] if step.name == "ENV" for pair in shlex.split(step.value)]
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs) if name != "PATH"}


@dataclass
class Build:
    """A build in a folder: its root, its arguments, and the environment of the steps."""

    root: Path
    variables: dict[str, str]
    arguments: dict[str, str]
    ran: list[str] = field(default_factory=list)

    def moved(self, text: str) -> str:
        """The text with the image's absolute paths under the root."""
        return FOLDERS.sub(f"{self.root}/", text)

    def run(self) -> None:
        for step in instructions():
            match step.name:
                case "ENV":
                    self.set_variables(step.value)
                case "ARG":
                    name, _, default = step.value.partition("=")
                    self.variables[name] = self.arguments.get(name, default)
                case "COPY":
                    self.copy(step)
                case "RUN" if not any(word in step.value for word in CHANGES_THE_MACHINE):
                    self.shell(self.moved(step.value))

    def set_variables(self, text: str) -> None:
        for pair in shlex.split(self.moved(text)):
            name, _, value = pair.partition("=")
            self.variables[name] = value.replace("$PATH", self.variables["PATH"])

    def copy(self, step: Instruction) -> None:
        *sources, target = self.moved(step.value).split()
        for source in sources:
            if step.flags:  # --from another stage: it lies there already, as all stages share the root
                assert source == target
                assert Path(source).exists(), f"{source} was not made by an earlier stage"
            else:
                assert is_sent(source), f"{source} is not let in by .dockerignore"
                copy_into(ROOT / source, Path(target), as_folder=target.endswith("/"))

    def shell(self, command: str) -> None:
        result = subprocess.run(["/bin/sh", "-c", command], env=self.variables, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        self.ran.append(command)

    def entrypoint(self) -> list[str]:
        """What the container runs: the last ENTRYPOINT, its program found by the image's PATH."""
        program, *arguments = json.loads(values("ENTRYPOINT")[-1])
        found = shutil.which(program, path=self.variables["PATH"])
        assert found is not None, f"{program} is not on the image's PATH"
        return [found, *arguments]


def copy_into(source: Path, target: Path, *, as_folder: bool) -> None:
    """As COPY does: a file into a folder or under a name, a folder's content into a folder."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return
    target = target / source.name if as_folder else target
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def is_sent(source: str) -> bool:
    """Whether .dockerignore, which excludes everything first, lets a path of the checkout into the build."""
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    return "*" in lines and f"!{source.partition('/')[0]}" in lines


def clean_environment() -> dict[str, str]:
    """What a shell needs to find its programs and a registry, and nothing of Python's or ours."""
    kept = ("PATH", "HOME", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    return {name: value for name, value in os.environ.items() if name in kept or name.startswith("PIP_")}
