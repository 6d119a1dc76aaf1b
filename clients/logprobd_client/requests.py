"""A call in one form, cut into requests. Knows neither HTTP nor an encoding."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
Scalar = TypeVar("Scalar", bound=np.generic)

BYTES_A_TOKEN = 4  # of text, about; only used to cut calls
MIN_SHARE = 4096  # tokens; a call is not cut smaller than this to occupy several services


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of every completion of a call, by the names of the wire."""

    temperature: float = 1.0
    entropy: bool = False
    top_logprobs: int = 0
    reduce: str = "none"
    add_special_tokens: bool = True
    expect: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The ids to score at each token of a completion: all of them, and how many belong to each token.

    `width` is set where they came as one array of shape (tokens, width), to be answered by such an array.
    """

    ids: IntArray
    lengths: IntArray
    width: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One prompt with some of its completions."""

    prompt: str | IntArray
    completions: list[str | IntArray]
    candidates: list[Candidates] | None = None

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.prompt) + sum(map(num_tokens, self.completions))

    def cut(self, max_tokens: int) -> Iterator["Group"]:
        """Pieces of at most so many tokens. Each computes the prompt anew: a long one gets longer pieces."""
        prompt = num_tokens(self.prompt)
        room = max_tokens - prompt if prompt <= max_tokens // 2 else max_tokens
        start = taken = 0
        for end, completion in enumerate(self.completions):
            tokens = num_tokens(completion)
            if taken + tokens > room and end > start:
                yield self._piece(start, end)
                start, taken = end, 0
            taken += tokens
        yield self._piece(start, len(self.completions))

    def _piece(self, start: int, end: int) -> "Group":
        candidates = None if self.candidates is None else self.candidates[start:end]
        return Group(self.prompt, self.completions[start:end], candidates)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one request asks. `first` is the number of its first completion among all of the call's."""

    groups: list[Group]
    first: int

    @property
    def completions(self) -> list[str | IntArray]:
        return [completion for group in self.groups for completion in group.completions]

    @property
    def candidates(self) -> list[Candidates] | None:
        """One item a completion, or None where nothing was given."""
        if not self.groups or any(group.candidates is None for group in self.groups):
            return None
        return [candidates for group in self.groups for candidates in group.candidates or []]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call in one form. `sizes` says how many completions each prompt has, or is None where they came flat.

    `has_text` is whether any prompt or completion is text, not ids.
    """

    groups: list[Group]
    sizes: list[int] | None
    options: Options
    has_text: bool

    @property
    def num_completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    def nest(self, items: list[Any]) -> list[Any]:
        """One item a completion, in the shape in which the completions came."""
        if self.sizes is None:
            return items
        return [items[end - size : end] for size, end in zip(self.sizes, accumulate(self.sizes), strict=True)]

    def parts(self, max_tokens: int, shares: int) -> list[Part]:
        """Requests of at most so many tokens, and where it is large enough, one for each of so many services.

        A group stays whole where it fits. There is always a part: the answer to nothing still names the model.
        """
        sized = list(self._sized(max_tokens))
        target = min(max_tokens, max(-(-sum(tokens for _, tokens in sized) // shares), MIN_SHARE))
        parts, taken, first = [Part([], 0)], 0, 0
        for group, tokens in sized:
            if parts[-1].groups and taken + tokens > target:
                parts.append(Part([], first))
                taken = 0
            parts[-1].groups.append(group)
            taken += tokens
            first += len(group.completions)
        return parts

    def _sized(self, max_tokens: int) -> Iterator[tuple[Group, int]]:
        """The groups, those cut that are too large, with their tokens."""
        for group in self.groups:
            if (tokens := group.num_tokens) <= max_tokens:
                yield group, tokens
            else:
                yield from ((piece, piece.num_tokens) for piece in group.cut(max_tokens))

    def relocate(self, part: Part, message: str) -> str:
        """A message about a part, with its field paths counted as in the call."""

        def place(match: re.Match[str]) -> str:
            number, field, index = int(match[1]), match[2], int(match[3] or 0)
            if number >= len(part.groups):
                return match[0]
            before = sum(len(group.completions) for group in part.groups[:number])
            entry, within = self._place(part.first + before + index)
            return f"groups[{entry}]" + (f".{field}[{within}]" if field else "")

        return re.sub(r"\bgroups\[(\d+)\](?:\.(completions|candidate_ids)\[(\d+)\])?", place, message)

    def _place(self, number: int) -> tuple[int, int]:
        """Which prompt a completion belongs to, and its place among that prompt's completions."""
        if self.sizes is None:
            return number, 0
        ends = list(accumulate(self.sizes))
        entry = next((entry for entry, end in enumerate(ends) if number < end), len(ends) - 1)
        return entry, number - ends[entry] + self.sizes[entry]


def num_tokens(value: str | IntArray) -> int:
    """Of ids, their number; of text, an estimate."""
    return len(value.encode()) // BYTES_A_TOKEN + 1 if isinstance(value, str) else len(value)


def options_on_wire(options: Options) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if value is not None}


def pieces(flat: NDArray[Scalar], lengths: Iterable[int]) -> list[NDArray[Scalar]]:
    """A flat array as the arrays that were joined in it, along the first dimension; raises ValueError if it is not."""
    ends = list(accumulate(lengths, initial=0))
    if ends[-1] != len(flat):
        raise ValueError(f"{len(flat)} numbers where the lengths say {ends[-1]}")
    return [flat[start:end] for start, end in pairwise(ends)]
