"""The objects that travel between the HTTP process and the engine: numpy only, no torch, no HTTP."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

MAX_TOP_LOGPROBS = 256
MAX_CANDIDATES = 256  # of a completion token: what a chunk of rows is asked for stays bounded


@dataclass(frozen=True, slots=True)
class Options:
    """What to compute for a sequence beside its logprobs.

    `temperature` divides the logits before they are normalized; `top_logprobs` is the number of most
    likely tokens to return at each position; `entropy` is in nats; `ranks` asks for each token's place among all
    tokens, most likely first.
    """

    temperature: float = 1.0
    top_logprobs: int = 0
    entropy: bool = False
    ranks: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens whose logprobs are wanted at each position of a completion, a ragged list of lists.

    `ids` holds all of them one after the other; `lengths[i]` says how many belong to completion token i.
    """

    ids: IntArray
    lengths: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """One prompt and one completion, as token ids, with what is asked about the completion."""

    prompt: IntArray
    completion: IntArray
    options: Options
    candidates: Candidates | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The answer to one sequence of n completion tokens.

    Shapes: `logprobs` (n,), `entropy` (n,) or None, `top_ids` and `top_logprobs` (n, k) or None,
    `candidate_logprobs` (sum of the candidates' lengths,) or None, `ranks` (n,) or None: 1 is the most likely. A
    probability of zero is -inf here. `computed_tokens` counts the tokens that went through the model for this
    sequence: what it shares with another sequence of its batch is counted for one of them only.
    """

    logprobs: FloatArray
    entropy: FloatArray | None
    top_ids: IntArray | None
    top_logprobs: FloatArray | None
    candidate_logprobs: FloatArray | None
    computed_tokens: int
    ranks: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one sequence has no scores: an error code of the contract's table and a sentence."""

    code: str
    message: str


Outcome = Scores | Failure
