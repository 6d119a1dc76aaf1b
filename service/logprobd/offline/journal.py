"""What was scored so far, beside the output: whatever happens to the process, nothing is scored twice.

`OUT.partial` holds a line that says what is being done, then a line for each batch with its answers, each
flushed to the disk before the next batch counts as done. A kill can tear the last line only, which is cut off.
"""

import fcntl
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from logprobd.offline.batches import Answer
from logprobd.offline.failures import RefusedError


@dataclass(slots=True)
class Done:
    """The batches of a section that are in the journal, and how many it has."""

    batches: set[int] = field(default_factory=set)
    out_of: int | None = None

    @property
    def is_complete(self) -> bool:
        return len(self.batches) == self.out_of


class Journal:
    """The open journal of one run; no other process can have it at the same time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] | None = None  # None: nothing was begun yet
        self.sections: dict[int, Done] = defaultdict(Done)
        self.weight = self.tokens = 0  # of the batches that are done
        self.finished = False  # the output was written whole
        self._file: BinaryIO = path.open("a+b")
        self._lock()
        self._recover()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        if not is_there:  # locked, or taken away in this moment by a process that had it
            self._file.close()
            raise RefusedError(f"{self.path} is in use: another process scores into the same file")

    def _recover(self) -> None:
        """Read what is whole, and cut off a line that was being written when the process ended."""
        whole = 0
        self._file.seek(0)
        for text in self._file:
            line = line_of(text)
            if line is None:
                break
            whole += len(text)
            self._note(line)
        self._file.truncate(whole)
        self._file.seek(whole)

    def _note(self, line: dict[str, Any]) -> None:
        if "header" in line:
            self.header = line["header"]
        elif "finished" in line:
            self.finished = True
        else:
            done = self.sections[line["section"]]
            done.batches.add(line["batch"])
            done.out_of = line["out_of"]
            self.weight += line["weight"]
            self.tokens += line["tokens"]

    def forget(self) -> None:
        """Drop whatever is there."""
        self._file.truncate(0)
        self.sections.clear()
        self.weight = self.tokens = 0
        self.header, self.finished = None, False

    def begin(self, header: dict[str, Any]) -> None:
        """Start anew: `header` is what later runs are held against."""
        self.forget()
        self.header = header
        self._write({"header": header})

    def add(self, section: int, batch: int, out_of: int, weight: int, tokens: int, answers: list[Answer]) -> None:
        """Keep a batch's answers. They are on the disk when this returns."""
        line = {"section": section, "batch": batch, "out_of": out_of, "weight": weight, "tokens": tokens}
        self._note(line)
        self._write(line | {"answers": [tuple(answer) for answer in answers]})

    def finish(self) -> None:
        """Say that the output is written whole, and only has to get its name."""
        self.finished = True
        self._write({"finished": True})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self._file.flush()
        os.fsync(self._file.fileno())

    def answers(self) -> Iterator[Answer]:
        """All answers, in the order in which they came."""
        with self.path.open("rb") as file:
            for text in file:
                for row, completion, parts in orjson.loads(text).get("answers", ()):
                    yield Answer(row, completion, parts)

    def remove(self) -> None:
        """The output is there: nothing of this is needed any more."""
        self.path.unlink()
        self._file.close()

    def close(self) -> None:
        """Leave the journal for the next run; nothing is left of one in which nothing was begun."""
        if self._file.closed:
            return
        if self.header is None:
            self.path.unlink()
        self._file.close()


def line_of(text: bytes) -> dict[str, Any] | None:
    """A line of the journal; None if it is not whole."""
    if not text.endswith(b"\n"):
        return None
    try:
        line: dict[str, Any] = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return line


def require_same(path: Path, begun: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to go on with anything else than what was begun: the rows would not belong together."""
    for name, value in now.items():
        if begun.get(name) != value:
            raise RefusedError(
                f"{path} was begun with {name} {begun.get(name)!r}, and now it is {value!r}: go on as it was begun, or "
                "start anew with --overwrite"
            )
