"""The memory plan: what fits under a limit, from what the real scoring path is measured to take.

At start a worker scores batches of two sizes with the costliest options, in the layout that it will serve,
and fits how much memory a token of a forward pass takes, and what does not depend on its size (a chunk of
logits, with what is read off it). From then on everything is arithmetic.
"""

import bisect
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from logprobd.engine.meter import Meter
from logprobd.engine.model import ModelRefusedError, weight_bytes
from logprobd.engine.scorer import CHUNK_BYTES, Scorer, rows_of_logits
from logprobd.messages import MemoryPlan
from logprobd.sequences import MAX_TOP_LOGPROBS, Candidates, IntArray, Options, Sequence
from logprobd.settings import MemoryLimit

SHARE_OF_AVAILABLE = 0.8  # of what is free at start, without a limit
MARGIN = 1.15  # over the measured bytes of a token: allocators keep some, and lengths differ
CHUNK_SHARE = 16  # a chunk of logits takes no more than this part of what is free beside the weights
HEAD_CHUNK_BYTES = {"cpu": CHUNK_BYTES, "cuda": 256 << 20}  # of float32 logits; a CPU's stay about in its cache
LARGEST_PASS = {"cpu": 4096, "cuda": 32768}  # tokens; more does not make a pass more efficient, only longer
SMALLEST_WINDOW = 64  # tokens; a sequence whose keys leave room for less is refused, rather than crawl
SMALL_PROBE, LARGE_PROBE = 128, 512  # tokens


@dataclass(frozen=True, slots=True)
class Fit:
    """Bytes that a pass takes beyond what is in use between batches: `fixed`, and by its tokens.

    `squared` is 0 where attention never holds (tokens, tokens) scores.
    """

    fixed: float
    each: float
    squared: float = 0.0

    def __call__(self, num_tokens: int) -> float:
        return self.fixed + self.each * num_tokens + self.squared * num_tokens**2


def plan_memory(scorer: Scorer, meter: Meter, limit: MemoryLimit | None, workers_on_device: int = 1) -> MemoryPlan:
    """Measure the scorer, bound its passes, and say what fits; raises ModelRefusedError if nothing does."""
    meter.release()
    idle = scorer.ranks.most(meter.used())
    most = scorer.ranks.least(limit_bytes(limit, meter, idle, workers_on_device))
    meter.cap(most)
    free = most - idle
    chunk = min(HEAD_CHUNK_BYTES[scorer.device.type], max(0, free) // CHUNK_SHARE)
    scorer.chunk_rows = rows_of_logits(chunk, scorer.logits_width)
    fit = measure(scorer, meter, free)
    smallest = math.ceil(fit(SMALLEST_WINDOW))
    if smallest > free:
        raise ModelRefusedError(
            f"--memory-limit {mib(most)} is too small: {mib(idle)} are in use once the model is loaded, "
            f"{mib(weight_bytes(scorer.model))} of weights among them, and a pass of {SMALLEST_WINDOW} tokens takes "
            f"{mib(smallest)} more, a chunk of {mib(chunk_bytes(scorer))} of logits among them; "
            f"{mib(idle + smallest)} would do"
        )
    plan = solve(scorer, meter, fit, most, idle)
    scorer.budget.allow(plan.max_pass_tokens, lambda longest: window_tokens(scorer, fit, free, longest))
    scorer.release = meter.release
    meter.release()
    meter.reset_peak()
    return plan


def limit_bytes(limit: MemoryLimit | None, meter: Meter, idle: int, workers: int) -> int:
    """The limit in bytes: as given, as a fraction of the device, or most of what is free now."""
    if limit is None:
        return idle + int(meter.available() * SHARE_OF_AVAILABLE / workers)
    return int(limit.fraction * meter.total()) if limit.bytes is None else limit.bytes


def chunk_bytes(scorer: Scorer) -> int:
    return scorer.chunk_rows * scorer.logits_width * 4


def measure(scorer: Scorer, meter: Meter, free: int) -> Fit:
    """Score two sizes (three where attention may hold a score for every pair of tokens) and fit what they take."""
    scorer.score(costly_batch(scorer, SMALL_PROBE))  # whatever is made once, on first use
    small = taken_by(scorer, meter, SMALL_PROBE)
    # No larger than what fits if all that the small one took were for its tokens: the limit holds at start, too.
    large = min(LARGE_PROBE, max(2 * SMALL_PROBE, free * SMALL_PROBE // max(1, small)))
    sizes = [SMALL_PROBE, large] if scorer.layout == "shared" else [SMALL_PROBE, (SMALL_PROBE + large) // 2, large]
    taken = [small, *(taken_by(scorer, meter, num_tokens) for num_tokens in sizes[1:])]
    squared = 0.0 if scorer.layout == "shared" else max(0.0, float(np.polyfit(sizes, taken, 2)[0]))
    each = max((taken[-1] - small) / (large - SMALL_PROBE) - squared * (large + SMALL_PROBE), least_bytes(scorer))
    fixed = max(0.0, small - each * SMALL_PROBE - squared * SMALL_PROBE**2, chunk_bytes(scorer))
    return Fit(fixed, each * MARGIN, squared * MARGIN)


def taken_by(scorer: Scorer, meter: Meter, num_tokens: int) -> int:
    """The most memory, beyond what is in use before it, while a batch is scored and its answer is written.

    Of several processes that compute together, that of the one that takes most.
    """
    meter.release()
    before = meter.used()
    meter.reset_peak()
    pickle.dumps(scorer.score(costly_batch(scorer, num_tokens)))
    return scorer.ranks.most(max(0, meter.peak() - before))


def least_bytes(scorer: Scorer) -> int:
    """What a token takes at the very least: its hidden state, a few times over."""
    embeddings: Any = scorer.model.get_input_embeddings()
    return 4 * int(embeddings.weight.shape[1]) * int(embeddings.weight.element_size())


def costly_batch(scorer: Scorer, num_tokens: int) -> list[Sequence]:
    """Sequences of so many distinct tokens that ask for everything, as few as the model's positions allow."""
    info = scorer.loaded.info
    random = np.random.default_rng(num_tokens)
    options = Options(temperature=0.9, top_logprobs=min(MAX_TOP_LOGPROBS, info.vocab_size), entropy=True)
    batch = []
    for start in range(0, num_tokens, info.max_positions):
        length = min(info.max_positions, num_tokens - start)
        ids: IntArray = random.integers(0, info.vocab_size, length + 1).astype(np.int32)[: info.max_positions]
        candidates = Candidates(ids[1:], np.ones(len(ids) - 1, dtype=np.int32))
        batch.append(Sequence(ids[:1], ids[1:], options, candidates))
    return batch


def solve(scorer: Scorer, meter: Meter, fit: Fit, limit: int, idle: int) -> MemoryPlan:
    """What fits under the limit."""
    free = limit - idle
    positions = scorer.loaded.info.max_positions
    most = largest(LARGEST_PASS[scorer.device.type], lambda tokens: fit(tokens) <= free)
    longest = largest(positions, lambda tokens: fits(scorer, fit, free, tokens))
    return MemoryPlan(
        limit=limit,
        baseline=meter.baseline,
        idle=idle,
        weights=weight_bytes(scorer.model),
        head_chunk=chunk_bytes(scorer),
        fixed=math.ceil(fit.fixed),
        per_token=math.ceil(fit.each),
        per_cached_token=math.ceil(scorer.laying.cache_bytes(positions, 0) / positions),
        max_pass_tokens=most,
        longest_sequence=longest,
    )


def fits(scorer: Scorer, fit: Fit, free: float, longest: int) -> bool:
    """Whether a sequence of that length can be scored: at once, or in windows that are not too small."""
    return fit(longest) <= free or (
        scorer.laying.in_windows and window_tokens(scorer, fit, free, longest) >= SMALLEST_WINDOW
    )


def window_tokens(scorer: Scorer, fit: Fit, free: float, longest: int) -> int:
    """The tokens of a window beside the keys and values of a path of `longest` tokens."""

    def fit_beside(tokens: int) -> bool:
        scores = fit.squared * tokens * (longest - tokens)
        return fit(tokens) + scores + scorer.laying.cache_bytes(longest, tokens) <= free

    return largest(LARGEST_PASS[scorer.device.type], fit_beside)


def largest(most: int, fit: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits; 0 if none does. What fits, fits with less as well."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda number: not fit(number))


def mib(num_bytes: float) -> str:
    return f"{math.ceil(num_bytes / 2**20)} MiB"
