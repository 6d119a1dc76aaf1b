"""What is scored at a time, its answers, and what a backend has to be able to do."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from logprobd.dialects.plans import ServedModel
from logprobd.errors import ApiError, field_path
from logprobd.offline.rows import ERROR_COLUMN, Columns, Row, complaint, weight_of
from logprobd.offline.settings import ScoreSettings
from logprobd.schemas import LogprobsRequest
from logprobd.sequences import Sequence


class Answer(NamedTuple):
    """What one completion of one row got: the parts of a reply, or `error` with the reason."""

    row: int
    completion: int
    parts: dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One completion of one row; `sequence` where it is tokenized here."""

    row: Row
    completion: int
    sequence: Sequence | None = None

    @property
    def weight(self) -> int:
        """Its part of the row's weight: the first completion carries the prompt."""
        prompt = weight_of(self.row.prompt) if self.completion == 0 else 0
        return prompt + weight_of(self.row.group.completions[self.completion])


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pieces that are scored together, or answers of pieces that need not be scored to know that they cannot be."""

    pieces: list[Piece]
    failed: list[Answer] = field(default_factory=list)
    failed_weight: int = 0

    @property
    def weight(self) -> int:
        return self.failed_weight + sum(piece.weight for piece in self.pieces)


class Scored(NamedTuple):
    """A batch's answers, and how many tokens its prompts and completions have."""

    answers: list[Answer]
    tokens: int


class Backend(Protocol):
    """Whoever computes the numbers: workers started for it, or a service."""

    lanes: int  # batches that it can have at a time

    async def keep_alive(self) -> None:
        """Runs beside the scoring, and ends only by raising."""

    async def open(self, plan: dict[str, Any] | None) -> ServedModel:
        """Wait until there is a model. `plan` is that of the run to go on with, so that batches are cut alike."""

    @property
    def plan(self) -> dict[str, Any]:
        """What batches depend on, beside the rows."""

    def batches(self, rows: Seq[Row]) -> list[Batch]:
        """The rows of a section as batches, the same at every run. Slow: called in a thread."""

    async def score(self, batch: Batch) -> Scored: ...


def request_of(settings: ScoreSettings) -> LogprobsRequest:
    """The options as a request has them; it has no groups of its own."""
    return LogprobsRequest(
        groups=[],
        temperature=settings.temperature,
        top_logprobs=settings.top_logprobs,
        entropy=settings.entropy,
        reduce=settings.reduce,
        tokens=settings.tokens,
        add_special_tokens=not settings.no_special_tokens,
    )


def failed(row: Row, completion: int, error: ApiError, columns: Columns) -> Answer:
    """The answer of a completion that cannot be scored."""
    return Answer(row.number, completion, {ERROR_COLUMN: complaint(error, columns, row.grouped)})


def error_at(completion: int, code: str, message: str) -> ApiError:
    return ApiError(code, message, param=field_path(("completions", completion)))
