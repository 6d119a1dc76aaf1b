"""The same sequence gets the same bits whatever shares its batch, in whatever order and windows, on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import FAMILIES, build
from logprobd.engine.model import load
from logprobd.engine.scorer import Scorer
from logprobd.engine.selftest import choose_scorer, has_half_kernels
from logprobd.sequences import Options, Outcome, Scores, Sequence
from logprobd.settings import ModelSettings, Precision
from oracle import ids_of, loaded
from running import Running

VOCAB_SIZE = {"embedded_service": 49152, "tiny_service": 211}


def groups_that_share(random: np.random.Generator, vocab_size: int, count: int) -> list[dict[str, Any]]:
    """Groups whose prompts and completions take over parts of one another, of 1 to about 300 tokens."""
    stem = random.integers(0, vocab_size, 300).tolist()

    def ids(longest: int) -> list[int]:
        kept = stem[: random.integers(0, longest)] if random.random() < 0.5 else []
        return [*kept, *random.integers(0, vocab_size, random.integers(1, 40)).tolist()]

    return [{"prompt": ids(260), "completions": [ids(20) for _ in range(random.integers(1, 4))]} for _ in range(count)]


def scores(running: Running, groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    reply = running.post({"groups": groups, "entropy": True, "top_logprobs": 2})
    assert reply.status_code == 200, reply.text
    return [group["completions"] for group in reply.json()["groups"]]


@pytest.mark.parametrize(("service", "count"), [("tiny_service", 60), ("embedded_service", 3)])
def test_company_and_order_do_not_change_a_bit(request: pytest.FixtureRequest, service: str, count: int) -> None:
    running: Running = request.getfixturevalue(service)
    random = np.random.default_rng(3)
    groups = groups_that_share(random, VOCAB_SIZE[service], count)
    alone = [scores(running, [group])[0] for group in groups]
    together = scores(running, groups)
    order = random.permutation(count).tolist()
    shuffled = scores(running, [groups[index] for index in order])
    with ThreadPoolExecutor(16) as pool:
        concurrent = list(pool.map(lambda group: scores(running, [group])[0], groups))

    assert together == alone
    assert [shuffled[order.index(index)] for index in range(count)] == alone
    assert concurrent == alone


Bits = tuple[bytes, ...]

FAMILIES_TRIED = ("Llama 2", "Gemma 2", "Qwen3", "Phi-3", "Cohere")  # softcap and sliding windows among them
CO_BATCHES = 30  # of each family in each precision: 300 in all


def bits_of(outcome: Outcome) -> Bits:
    assert isinstance(outcome, Scores), outcome
    arrays = (outcome.logprobs, outcome.entropy, outcome.top_ids, outcome.top_logprobs)
    return tuple(array.tobytes() for array in arrays if array is not None)


def sequences_that_share(random: np.random.Generator, vocab_size: int, groups: int) -> list[Sequence]:
    """Sequences whose beginnings are shared, with options that differ from one to the next."""
    return [
        Sequence(
            ids_of(group["prompt"]),
            ids_of(completion),
            Options(
                temperature=float(random.choice([1.0, 0.7])),
                top_logprobs=int(random.integers(0, 6)),
                entropy=bool(random.integers(2)),
            ),
        )
        for group in groups_that_share(random, vocab_size, groups)
        for completion in group["completions"]
    ]


def assert_company_changes_nothing(scorer: Scorer, pool: list[Sequence], co_batches: int, seed: int) -> None:
    """Random co-batches, orders and windows against each sequence alone.

    Where each is computed alone anyway, windows stay: there the processor's kernels go by the size of a pass.
    """
    random = np.random.default_rng(seed)
    budgets = [10_000] if scorer.alone else [64, 200, 10_000]
    alone = [bits_of(scorer.score([sequence])[0]) for sequence in pool]
    for _ in range(co_batches):
        chosen = random.permutation(len(pool))[: random.integers(2, len(pool) + 1)].tolist()
        scorer.budget.allow(int(random.choice(budgets)))
        outcomes = scorer.score([pool[index] for index in chosen])
        assert [bits_of(outcome) for outcome in outcomes] == [alone[index] for index in chosen]


def needs_the_lane(precision: Precision) -> bool:
    """Whether this CPU gives the same bits in this precision only under --batch-invariant."""
    return precision != "float32" and has_half_kernels()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES_TRIED)
def test_random_company_does_not_change_a_bit_of_a_tiny_model(name: str, precision: Precision) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    model = build(family).to(getattr(torch, precision))
    alone = needs_the_lane(precision)
    scorer, selftest = choose_scorer(loaded(model, ModelSettings(precision=precision)), alone=alone)
    pool = sequences_that_share(np.random.default_rng(1), VOCAB_SIZE["tiny_service"], 12)

    assert (selftest.layout, selftest.batch_invariant) == ("shared", True)
    assert_company_changes_nothing(scorer, pool, CO_BATCHES, seed=2)


@pytest.mark.parametrize(("precision", "groups", "co_batches"), [("float32", 3, 3), ("bfloat16", 1, 1)])
def test_random_company_does_not_change_a_bit_of_the_embedded_model(
    embedded_folder: Path, precision: Precision, groups: int, co_batches: int
) -> None:
    settings = ModelSettings(model=str(embedded_folder), precision=precision)
    scorer, selftest = choose_scorer(load(settings, torch.device("cpu")), alone=needs_the_lane(precision))
    pool = sequences_that_share(np.random.default_rng(3), VOCAB_SIZE["embedded_service"], groups)

    assert selftest.batch_invariant
    assert_company_changes_nothing(scorer, pool, co_batches, seed=4)


@pytest.mark.parametrize("name", ["BLOOM", "Qwen3 MoE"])
def test_where_company_may_change_bits_each_sequence_can_be_computed_alone(name: str) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    pool = sequences_that_share(np.random.default_rng(1), VOCAB_SIZE["tiny_service"], 8)
    scorer, selftest = choose_scorer(loaded(build(family)), alone=True)

    assert selftest.batch_invariant
    alone = [bits_of(scorer.score([sequence])[0]) for sequence in pool]
    assert [bits_of(outcome) for outcome in scorer.score(pool)] == alone


def test_what_is_known_to_vary_is_not_called_invariant() -> None:
    (family,) = (family for family in FAMILIES if family.name == "Llama 2")
    _, under_autocast = choose_scorer(loaded(build(family), ModelSettings(precision="autocast")))

    assert not under_autocast.batch_invariant
