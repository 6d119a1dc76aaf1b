"""Parquet in and out. The only home of pyarrow, and loaded only where a file is Parquet (the extra `parquet`)."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from logprobd.offline.failures import RefusedError
from logprobd.offline.rows import ERROR_COLUMN, Cells, Columns, Format, place_of, taken

ROW_GROUP_ROWS = 8192

# The Arrow type of each part of an answer to one completion.
_NUMBERS, _STRINGS = pa.list_(pa.float32()), pa.list_(pa.string())
TYPES: dict[str, pa.DataType] = {
    "logprobs": _NUMBERS,
    "sum": pa.float32(),
    "entropy": _NUMBERS,
    "top_ids": pa.list_(pa.list_(pa.int32())),
    "top_logprobs": pa.list_(_NUMBERS),
    "top_tokens": pa.list_(_STRINGS),
    "token_ids": pa.list_(pa.int32()),
    "tokens": _STRINGS,
    ERROR_COLUMN: pa.string(),
}


class ParquetRows:
    """A Parquet file; only the columns that are asked for are read."""

    def __init__(self, path: Path, columns: Columns, output: Format) -> None:
        self._path, self._columns = path, columns
        try:
            self.arrow_schema: pa.Schema = pq.read_schema(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise RefusedError(f"{path}: not a Parquet file: {error}") from None
        for name in (columns.prompt, columns.completion):
            if name not in self.arrow_schema.names:
                raise RefusedError(
                    f"{path}: {name}: there is no such column; it has {', '.join(self.arrow_schema.names)}"
                )
        for name in columns.added.values():
            if name in self.arrow_schema.names:
                raise RefusedError(taken(str(path), name))
        self._require(columns.prompt, is_text_or_ids)
        self._require(columns.completion, lambda kind: is_text_or_ids(kind) or is_several(kind))
        self.grouped: bool | None = is_several(self.arrow_schema.field(columns.completion).type)
        if output == "jsonl":
            self._refuse_what_json_lacks()

    def cells(self, first: int = 0) -> Iterator[Cells]:
        """The rows from number `first` on."""
        number = 0
        for batch in self._read([self._columns.prompt, self._columns.completion]):
            if number + batch.num_rows > first:
                prompts, completions = (batch.column(name).to_pylist() for name in self._names())
                for index in range(max(0, first - number), batch.num_rows):
                    place = place_of(self._path, number + index + 1)
                    yield Cells(number + index, place, prompts[index], completions[index])
            number += batch.num_rows

    def lines(self) -> Iterator[bytes]:
        """The rows as JSON objects."""
        for batch in self._read(None):
            for row in batch.to_pylist():
                yield orjson.dumps(row, default=str)  # decimals and durations

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as they are."""
        return self._read(None)

    def _names(self) -> tuple[str, str]:
        return self._columns.prompt, self._columns.completion

    def _read(self, names: list[str] | None) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self._path) as file:
            yield from file.iter_batches(ROW_GROUP_ROWS, columns=names)

    def _require(self, name: str, fits: Any) -> None:
        kind = self.arrow_schema.field(name).type
        if not fits(kind):
            raise RefusedError(f"{self._path}: {name}: the column holds {kind}; expected text or lists of token ids")

    def _refuse_what_json_lacks(self) -> None:
        for field in self.arrow_schema:
            if lacking := next(filter(is_bytes, nested(field.type)), None):
                raise RefusedError(
                    f"{self._path}: {field.name}: the column holds {lacking}, which JSON has no form for; "
                    "write to a .parquet file"
                )


def is_text_or_ids(kind: pa.DataType) -> bool:
    if is_list(kind):
        return bool(pa.types.is_integer(kind.value_type) or pa.types.is_null(kind.value_type))
    if pa.types.is_dictionary(kind):
        return is_text_or_ids(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_several(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists of completions. Lists of nothing at all are no tokens."""
    return is_list(kind) and not pa.types.is_null(kind.value_type) and is_text_or_ids(kind.value_type)


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def nested(kind: pa.DataType) -> Iterator[pa.DataType]:
    """A type and all those inside it."""
    yield kind
    for index in range(kind.num_fields):
        yield from nested(kind.field(index).type)


def schema_of_objects(rows: Iterator[dict[str, Any]], path: Path) -> pa.Schema:
    """One schema for JSON objects; raises RefusedError for a column that has none."""
    schema = pa.schema([])
    try:
        for part in in_parts(rows):
            found = pa.schema(pa.array(part).type)
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
    except (pa.ArrowException, OverflowError) as error:
        raise RefusedError(f"{path}: no Parquet column can hold this: {error}; write to a .jsonl file") from None
    for field in schema:
        if any(pa.types.is_struct(kind) and not kind.num_fields for kind in nested(field.type)):
            raise RefusedError(f"{path}: {field.name}: Parquet has no form for empty objects; write to a .jsonl file")
    return schema


def batches_of_objects(rows: Iterator[dict[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """JSON objects as Arrow; what an object lacks is null."""
    for part in in_parts(rows):
        yield pa.RecordBatch.from_pylist(part, schema=schema)


def in_parts(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while part := list(islice(rows, ROW_GROUP_ROWS)):
        yield part


def write(
    path: Path,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    added: Iterator[dict[str, Any]],
    columns: Columns,
    grouped: bool,
) -> None:
    """Write the batches with the added columns, of which `added` gives a row's values at a time."""
    fields = [
        pa.field(name, pa.list_(TYPES[part]) if grouped and part != ERROR_COLUMN else TYPES[part])
        for part, name in columns.added.items()
    ]
    whole = pa.schema([*schema, *fields], metadata=schema.metadata)
    with pq.ParquetWriter(path, whole) as writer:
        for batch in batches:
            values = list(islice(added, batch.num_rows))
            arrays = [pa.array([row[field.name] for row in values], field.type) for field in fields]
            writer.write_batch(pa.RecordBatch.from_arrays([*batch.columns, *arrays], schema=whole))
