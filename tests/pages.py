"""The pages on deployment, and their commands, run as a reader would."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from running import ROOT, environment

PAGES = ("docker", "kubernetes", "tensor-parallel", "tuning")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def commands(name: str) -> list[str]:
    """The lines of a page's shell blocks, each a command."""
    blocks = re.findall(r"```sh\n(.*?)```", page(name), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def all_commands(*programs: str) -> Iterator[str]:
    for name in PAGES:
        yield from (command for command in commands(name) if command.startswith(programs))


def run(command: str, folder: Path, **variables: str) -> str:
    """What a command prints, run by a shell that finds `logprobd` and the checkout's files."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "logprobd"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m logprobd "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    result = subprocess.run(
        ["sh", "-ec", command],
        env=environment(PATH=path, **variables),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout
