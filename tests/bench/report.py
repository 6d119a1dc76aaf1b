"""What benchmarks leave: JSON lines, a Markdown table, and where it says more, a plot."""

import json
import os
import platform
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def report(name: str, rows: Seq[Row], folder: Path | None, note: str = "") -> None:
    """Print rows as JSON lines and as a table; with a folder, keep both there."""
    lines = "\n".join(json.dumps(row) for row in rows)
    text = "\n".join(
        [f"# {name}", "", f"{where()}", "", f"`{command()}`", "", *([note, ""] if note else []), table(rows)]
    )
    print(lines)
    print(text, file=sys.stderr)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text(lines + "\n")
        (folder / f"{name}.md").write_text(text + "\n")


def where() -> str:
    """The machine, in a line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}"
    return f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}"


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor()


def command() -> str:
    return " ".join([".venv/bin/python", "tests/bench", *sys.argv[1:]])


def table(rows: Seq[Row]) -> str:
    """A Markdown table; a column for every key, in the order of their first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(shown(row.get(column)) for column in columns) + " |" for row in rows])


def shown(value: object) -> str:
    if value is None:
        return ""
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
