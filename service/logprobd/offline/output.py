"""The output: the rows of the input, in its order, with their answers in columns behind them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from logprobd.offline.batches import Answer
from logprobd.offline.failures import StoppedError
from logprobd.offline.files import Input
from logprobd.offline.rows import ERROR_COLUMN, Columns, Format


@dataclass(slots=True)
class Joined:
    """The answers of each row, in the order of the rows, as columns; reads the journal no further than it must."""

    answers: Iterator[Answer]
    source: Input
    columns: Columns
    grouped: bool
    failed: int = 0  # rows with an error, so far
    _early: dict[tuple[int, int], bytes] = field(default_factory=dict)  # as bytes: they take a fraction of the memory

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for cells in self.source.cells():
            count = len(cells.completion) if self.grouped else 1
            parts = [self._parts(cells.number, completion) for completion in range(count)]
            error = next((part[ERROR_COLUMN] for part in parts if ERROR_COLUMN in part), None)
            if error is not None:
                self.failed += 1
                if ERROR_COLUMN not in self.columns.added:
                    raise StoppedError(f"{cells.place}: {error} (as noted by a run with --keep-going)")
            yield self._values(parts, error)

    def _parts(self, row: int, completion: int) -> dict[str, Any]:
        while (row, completion) not in self._early:
            answer = next(self.answers)
            self._early[answer.row, answer.completion] = orjson.dumps(answer.parts)
        parts: dict[str, Any] = orjson.loads(self._early.pop((row, completion)))
        return parts

    def _values(self, parts: list[dict[str, Any]], error: str | None) -> dict[str, Any]:
        """One row's values by column; all null where any of its completions could not be scored."""
        values: dict[str, Any] = {}
        for part, name in self.columns.added.items():
            if part == ERROR_COLUMN:
                values[name] = error
            elif error is not None:
                values[name] = None
            else:
                values[name] = [given.get(part) for given in parts] if self.grouped else parts[0].get(part)
        return values


def write(path: Path, output: Format, source: Input, joined: Joined) -> None:
    """Write the whole output and see it on the disk."""
    if output == "jsonl":
        write_lines(path, source.lines(), iter(joined))
    else:
        from logprobd.offline import parquet  # pyarrow is loaded only where Parquet is

        parquet.write(path, source.arrow_schema, source.batches(), iter(joined), joined.columns, joined.grouped)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_lines(path: Path, lines: Iterator[bytes], added: Iterator[dict[str, Any]]) -> None:
    """Each row's own object, to the byte, with the added columns before its last brace."""
    with path.open("wb") as file:
        for line, values in zip(lines, added, strict=True):
            file.write(line[:-1].rstrip() + b"," + orjson.dumps(values)[1:] + b"\n")


def put_in_place(written: Path, out: Path) -> None:
    """Give the output its name, at once and for good."""
    written.replace(out)
    folder = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
