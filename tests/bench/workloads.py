"""GRPO-shaped batches of random token ids, the same for every method."""

from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from logprobd.sequences import IntArray, Options, Sequence


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompts with a group of completions each; lengths are ranges, both ends included."""

    prompts: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    group: int

    def scaled(self, scale: float) -> "Shape":
        """Fewer prompts by a factor, at least one."""
        return replace(self, prompts=max(1, round(self.prompts * scale)))


SHAPES = {
    "short": Shape(8, (64, 128), (32, 128), 8),
    "long-prompt": Shape(2, (512, 1024), (64, 192), 8),
    "long-completion": Shape(4, (64, 128), (512, 1024), 4),
    "tree": Shape(2, (64, 128), (256, 512), 8),
    "distinct": Shape(16, (64, 128), (64, 192), 1),
}


def sequences_of(name: str, vocab_size: int, scale: float = 1.0, seed: int = 0) -> list[Sequence]:
    """The sequences of a shape; in `tree`, completions leave one another at random places."""
    shape, random = SHAPES[name].scaled(scale), np.random.default_rng(seed)

    def ids(lengths: tuple[int, int]) -> IntArray:
        return random.integers(0, vocab_size, random.integers(lengths[0], lengths[1] + 1)).astype(np.int32)

    sequences = []
    for _ in range(shape.prompts):
        prompt, completions = ids(shape.prompt_tokens), [ids(shape.completion_tokens) for _ in range(shape.group)]
        if name == "tree":
            completions = [grown(random, completions[: index + 1]) for index in range(len(completions))]
        sequences += [Sequence(prompt, completion, Options()) for completion in completions]
    return sequences


def grown(random: np.random.Generator, completions: list[IntArray]) -> IntArray:
    """The last completion, behind the beginning of an earlier one."""
    *earlier, own = completions
    if not earlier:
        return own
    stem = earlier[random.integers(len(earlier))]
    return np.concatenate([stem[: random.integers(len(stem))], own])[: len(own)]


def groups_of(sequences: list[Sequence]) -> list[list[Sequence]]:
    """Neighbours that have the same prompt."""
    return [list(members) for _, members in groupby(sequences, key=lambda sequence: sequence.prompt.tobytes())]


def scored_tokens(sequences: list[Sequence]) -> int:
    return sum(len(sequence.completion) for sequence in sequences)
