"""Scores a tiny model of every family against its own forward, and prints the table in docs/families.md.

make families
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch

from families import FAMILIES, UNAVAILABLE, Family, build
from logprobd.engine.model import ModelRefusedError
from logprobd.engine.selftest import choose_scorer
from logprobd.sequences import IntArray, Options, Scores, Sequence
from oracle import entropies, loaded, own_distribution

INTRODUCTION = """# Model families

How each causal family of the installed transformers is served: in the `shared` layout (a prefix tree) where
that gives the model's own numbers, else `padded`, as the self-test at load decides; a family that is exact
in neither is refused. Each row is a tiny random model with large weights, windows shorter than the
sequences and real caps and scales, scored over a tree of prompts and completions; the error is the largest
difference (nats, float32) of any logprob or entropy from the model's own forward on that one sequence.

This table is made by `make families`; `tests/test_families.py` checks every row.

| family | model type | exercises | layout | largest error | why not shared |
| --- | --- | --- | --- | --- | --- |"""


@dataclass(frozen=True, slots=True)
class Served:
    """How a family is served: `layout` is shared, padded or refused."""

    layout: str
    max_error: float | None
    reason: str


def sequences_of(vocab_size: int, longest: int) -> list[Sequence]:
    """Groups that branch early and late, some longer than two windows, with prompts of 1 to 60 tokens."""
    random = np.random.default_rng(7)

    def ids(length: int) -> IntArray:
        return random.integers(0, vocab_size, length).astype(np.int32)

    stem = ids(45)
    prompts = [stem, stem[:20], np.concatenate([stem[:33], ids(27)]), ids(1), ids(12)]
    completions = [ids(30), ids(9), ids(1)]
    completions.append(np.concatenate([completions[0][:11], ids(8)]))
    return [
        Sequence(prompt, completion, Options(entropy=True))
        for prompt in prompts
        for completion in completions
        if len(prompt) + len(completion) <= longest
    ]


def serve(family: Family) -> Served:
    """Build the family's tiny model, let the self-test choose, and measure every sequence."""
    model = build(family)
    wrapped = loaded(model)
    sequences = sequences_of(wrapped.info.vocab_size, wrapped.info.max_positions)
    own = [own_distribution(model, sequence.prompt, sequence.completion) for sequence in sequences]
    try:
        scorer, selftest = choose_scorer(wrapped)
    except ModelRefusedError as refused:
        return Served("refused", None, str(refused))
    worst = 0.0
    for sequence, rows, outcome in zip(sequences, own, scorer.score(sequences), strict=True):
        assert isinstance(outcome, Scores), outcome
        assert outcome.entropy is not None
        expected = rows[np.arange(len(sequence.completion)), sequence.completion]
        worst = max(worst, float(np.abs(outcome.logprobs - expected).max()))
        worst = max(worst, float(np.abs(outcome.entropy - entropies(rows)).max()))
    return Served(selftest.layout, worst, "" if selftest.layout == "shared" else selftest.reason)


def table_row(family: Family, served: Served) -> str:
    error = "" if served.max_error is None else f"{served.max_error:.0e}"
    cells = [family.name, family.config().model_type, family.notes, served.layout, error, served.reason]
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def main() -> None:
    torch.set_num_threads(1)
    print(INTRODUCTION)
    for family in FAMILIES:
        print(table_row(family, serve(family)), flush=True)
        print(family.name, file=sys.stderr, flush=True)
    print("\nNot in the installed transformers, or not to be built there:\n")
    for name, reason in UNAVAILABLE.items():
        print(f"- {name}: {reason}")


if __name__ == "__main__":
    main()
