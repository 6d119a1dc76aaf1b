"""A row of a file as a prompt and its completions, and every complaint about it as `FILE:LINE: column: ...`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from logprobd.dialects.native import group_of
from logprobd.errors import ApiError
from logprobd.offline.failures import RefusedError
from logprobd.offline.settings import ScoreSettings
from logprobd.schemas import Group
from logprobd.sequences import IntArray

Format = Literal["jsonl", "parquet"]

CHARACTERS_A_TOKEN = 4  # about, for progress and for the size of requests
ERROR_COLUMN = "error"


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that are read, and those that are added: each part of an answer with its column's name."""

    prompt: str
    completion: str
    added: dict[str, str]


class Cells(NamedTuple):
    """What a row holds in the columns that are read: its number from 0, where it stands, and the values."""

    number: int
    place: str
    prompt: Any
    completion: Any


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row that can be scored. `grouped`: its completions are a list in the file, not a single one."""

    number: int
    place: str
    group: Group
    grouped: bool

    @property
    def prompt(self) -> str | IntArray:
        prompt: str | IntArray = self.group.prompt
        return prompt

    @property
    def weight(self) -> int:
        """About how many tokens there are to score; nothing without completions."""
        if not self.group.completions:
            return 0
        return weight_of(self.prompt) + sum(map(weight_of, self.group.completions))


def columns_of(settings: ScoreSettings) -> Columns:
    """The names of all columns, as the options say."""
    main = "sum" if settings.reduce == "sum" else "logprobs"
    given = settings.output_column
    asked = {
        "entropy": settings.entropy,
        "top_ids": settings.top_logprobs > 0,
        "top_logprobs": settings.top_logprobs > 0,
        "top_tokens": settings.top_logprobs > 0 and settings.tokens,
        "token_ids": settings.tokens,
        "tokens": settings.tokens,
        ERROR_COLUMN: settings.keep_going,
    }
    beside = {part: part if given is None else f"{given}_{part}" for part, wanted in asked.items() if wanted}
    return Columns(settings.prompt_column, settings.completion_column, {main: given or main, **beside})


def row_of(cells: Cells, columns: Columns, grouped: bool) -> Row:
    """Check a row's values; raises RefusedError for what no model could score."""
    if grouped and not isinstance(cells.completion, list):
        raise RefusedError(f"{cells.place}: {columns.completion}: expected a list of completions, as in other rows")
    if not grouped and form_of(cells.completion) == "several":
        raise RefusedError(f"{cells.place}: {columns.completion}: expected a single completion, as in other rows")
    try:
        group = group_of(cells.prompt, cells.completion if grouped else [cells.completion])
    except ApiError as error:
        raise RefusedError(f"{cells.place}: {complaint(error, columns, grouped)}") from None
    if not len(group.prompt) and not isinstance(group.prompt, str):
        message = "an empty prompt cannot score its first token; give at least a BOS token"
        raise RefusedError(f"{cells.place}: {columns.prompt}: {message}")
    return Row(cells.number, cells.place, group, grouped)


def form_of(completion: Any) -> str | None:
    """Whether a cell holds one completion or several; None for an empty list, which can be either."""
    if isinstance(completion, list):
        if not completion:
            return None
        return "several" if isinstance(completion[0], str | list) else "one"
    return "one"


def weight_of(value: str | IntArray) -> int:
    """About how many tokens a text or a list of ids has."""
    return -(-len(value) // CHARACTERS_A_TOKEN) if isinstance(value, str) else len(value)


def complaint(error: ApiError, columns: Columns, grouped: bool) -> str:
    """An error about a group in the words of the file: where it says `completions[3][17]`, the column's name."""
    param, message = error.param or "", error.message.removeprefix(f"{error.param}: ")
    completions = "completions" if grouped else "completions[0]"
    for field, column in ((completions, columns.completion), ("prompt", columns.prompt)):
        if param.startswith(field):
            return f"{column}{param.removeprefix(field)}: {message}"
    return message


def place_of(path: Path, line: int) -> str:
    """Where a row stands, as editors and compilers write it; lines (rows, in Parquet) count from 1."""
    return f"{path}:{line}"


def taken(place: str, name: str) -> str:
    return f"{place}: {name}: the column is there already; choose another name with --output-column"
