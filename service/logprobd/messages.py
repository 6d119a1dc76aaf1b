"""What the HTTP process and a worker process say to each other, beside sequences and outcomes."""

from dataclasses import dataclass
from typing import Literal

from logprobd.sequences import Outcome
from logprobd.settings import ModelSettings

Layout = Literal["shared", "padded"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The identity of the served model, as replies and /info give it."""

    id: str
    path: str
    family: str
    fingerprint: str
    precision: str
    head_precision: str
    vocab_size: int
    max_positions: int
    weights_version: int = 0


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """A tokenizer as the `tokenizers` library reads it; None for a model without a usable one."""

    json: str | None
    bos_token_id: int | None


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The layout that the self-test chose, the errors it measured (nats) and why.

    `error_*` compare the chosen layout with the model's own forward; `shared_max_error` is that of the
    shared layout even where it was not chosen, and `windows_max_error` that of sequences cut into windows; they
    are None where a way could not run at all. `batch_invariant`: sequences got the same bits alone as together.
    `layers` says what each layer does with a packed row.
    """

    layout: Layout
    max_error: float
    mean_error: float
    max_entropy_error: float
    shared_max_error: float | None
    windows_max_error: float | None
    batch_invariant: bool
    reason: str
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a worker stays within its limit; bytes of its device, beyond `baseline`, and tokens.

    `baseline` is what the process takes before it loads anything (resident memory; 0 on CUDA). `idle` is in use
    between batches, the `weights` among it. A pass takes `fixed` (a `head_chunk` of logits among it) and
    `per_token` for each of up to `max_pass_tokens` tokens; a longer sequence goes in windows and takes
    `per_cached_token` as well, up to `longest_sequence` tokens.
    """

    limit: int
    baseline: int
    idle: int
    weights: int
    head_chunk: int
    fixed: int
    per_token: int
    per_cached_token: int
    max_pass_tokens: int
    longest_sequence: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a worker: what to load, where, and on how many threads (None: torch's default).

    Several devices are joined by +.
    """

    settings: ModelSettings
    device: str
    threads: int | None


@dataclass(frozen=True, slots=True)
class Loading:
    """A step of a worker's start, for the log."""

    step: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker will never be able to serve: the reason in a sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker serves this model."""

    model: ModelInfo
    tokenizer: TokenizerInfo
    selftest: SelfTest
    device: str
    memory: MemoryPlan
    seconds_per_token: float  # of a costly batch, measured at start
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as seen from outside; `memory_*` are bytes of its device, None until it has loaded its model."""

    name: str
    device: str
    pid: int | None
    state: str
    restarts: int
    memory_used: int | None
    memory_peak: int | None
    memory_limit: int | None
    out_of_memory_halvings: int


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """The outcomes of one batch, in its order, and the worker's memory since it started serving, in bytes."""

    outcomes: tuple[Outcome, ...]
    memory_used: int
    memory_peak: int
    out_of_memory_halvings: int
