"""What every file can do, whatever its format, and JSON lines. Parquet is in parquet.py."""

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import orjson

from logprobd.offline.failures import RefusedError
from logprobd.offline.rows import Cells, Columns, Format, place_of, taken

SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class Input(Protocol):
    """A file of rows, read from its start as often as one likes.

    `grouped` says whether completions come in lists, where the format itself knows. `cells` gives what is scored;
    `lines` whole rows as JSON objects, `batches` as Arrow (with `arrow_schema`), for the output.
    """

    grouped: bool | None

    @property
    def arrow_schema(self) -> Any: ...

    def cells(self, first: int = 0) -> Iterator[Cells]: ...

    def lines(self) -> Iterator[bytes]: ...

    def batches(self) -> Iterator[Any]: ...


def format_of(path: Path) -> Format:
    """The format that a file's name ends in; raises RefusedError for any other."""
    found = SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise RefusedError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    return found


class JsonLines:
    """One JSON object a line; lines of white space alone are no rows."""

    grouped: bool | None = None

    def __init__(self, path: Path, columns: Columns) -> None:
        self._path, self._columns = path, columns

    def cells(self, first: int = 0) -> Iterator[Cells]:
        """The rows from number `first` on; raises RefusedError where a line is no such row."""
        for number, (line, text) in enumerate(self._texts()):
            if number >= first:
                place = place_of(self._path, line)
                row = self._parse(text, place)
                yield Cells(number, place, row[self._columns.prompt], row[self._columns.completion])

    def lines(self) -> Iterator[bytes]:
        """The rows as they stand in the file, to the byte."""
        for _line, text in self._texts():
            yield text

    @cached_property
    def arrow_schema(self) -> Any:
        from logprobd.offline import parquet  # pyarrow is loaded only where Parquet is

        return parquet.schema_of_objects(self._objects(), self._path)

    def batches(self) -> Iterator[Any]:
        from logprobd.offline import parquet

        return parquet.batches_of_objects(self._objects(), self.arrow_schema)

    def _objects(self) -> Iterator[dict[str, Any]]:
        for _line, text in self._texts():
            yield orjson.loads(text)

    def _texts(self) -> Iterator[tuple[int, bytes]]:
        with self._path.open("rb") as file:
            for line, text in enumerate(file, start=1):
                if stripped := text.strip():
                    yield line, stripped

    def _parse(self, text: bytes, place: str) -> dict[str, Any]:
        try:
            row = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RefusedError(f"{place}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise RefusedError(f"{place}: expected a JSON object")
        for name in (self._columns.prompt, self._columns.completion):
            if name not in row:
                raise RefusedError(f"{place}: {name}: there is no such column; it has {', '.join(row) or 'none'}")
        for name in self._columns.added.values():
            if name in row:
                raise RefusedError(taken(place, name))
        return row


def open_input(path: Path, columns: Columns, output: Format) -> Input:
    """The file to read, for an output of that format; raises RefusedError where it is none that can be scored."""
    if not path.is_file():
        raise RefusedError(f"{path} does not exist")
    if format_of(path) == "jsonl":
        return JsonLines(path, columns)
    from logprobd.offline import parquet

    return parquet.ParquetRows(path, columns, output)


def require_libraries(formats: set[Format]) -> None:
    """Refuse Parquet where pyarrow is not installed."""
    if "parquet" in formats and find_spec("pyarrow") is None:
        raise RefusedError("Parquet needs pyarrow: pip install 'logprobd[parquet]'")
