"""Selective logprobs against a float64 log-softmax over the whole vocabulary."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from logprobd.engine.selective import Head, Selected, Targets, select
from oracle import FloatArray64, entropies, ids_of

VOCAB = 37
ROWS = 11
FULL = 16  # rows that the head gets at a time at least
INFINITY = float("inf")


@dataclass
class RecordingHead:
    """A head that looks its logits up by the row's number, and remembers how many rows it saw at a time."""

    logits: torch.Tensor
    calls: list[int] = field(default_factory=list)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        return self.logits[hidden[:, 0].long()]

    @property
    def hidden(self) -> torch.Tensor:
        return torch.arange(len(self.logits))[:, None].float()


def score(head: Head, hidden: torch.Tensor, targets: Targets, chunk_rows: int, pass_rows: int = ROWS) -> Selected:
    """Select from one forward pass, or from several of so many rows."""
    passes = [(first, hidden[first : first + pass_rows]) for first in range(0, len(hidden), pass_rows)]
    return select(head, passes, targets, chunk_rows, hidden.device)


def random_logits(dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> torch.Tensor:
    return (torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def targets_of(
    rows: list[int],
    ids: list[int] | None = None,
    temperatures: list[float] | None = None,
    entropy: list[bool] | None = None,
    top: list[int] | None = None,
    candidates: list[list[int]] | None = None,
    ranks: list[bool] | None = None,
) -> Targets:
    asked = candidates or []
    return Targets(
        rows=ids_of(rows),
        ids=ids_of(ids or [(7 * place + 3) % VOCAB for place in range(len(rows))]),
        temperatures=np.array(temperatures or [1.0] * len(rows)),
        entropy=np.array(entropy or [False] * len(rows)),
        top_logprobs=ids_of(top or [0] * len(rows)),
        ranks=np.array(ranks or [False] * len(rows)),
        candidate_ids=ids_of(list(itertools.chain(*asked))),
        candidate_owners=ids_of([owner for owner, ids in enumerate(asked) for _ in ids]),
    )


def expected_rows(logits: torch.Tensor, targets: Targets) -> FloatArray64:
    """The float64 log-softmax row of every target."""
    chosen = logits[torch.from_numpy(targets.rows).long()].double().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (chosen - chosen.max(axis=1, keepdims=True)) / targets.temperatures[:, None]
    return torch.from_numpy(scaled).log_softmax(dim=-1).numpy()


def close(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> bool:
    """Within rounding; about where float32 ends, a huge negative number is as good as minus infinity."""
    assert got.dtype == np.float32
    got, expected = (np.where(logprobs < -1e37, -INFINITY, logprobs) for logprobs in (got, expected))
    return bool(np.allclose(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True))


def assert_all_as_expected(selected: Selected, logits: torch.Tensor, targets: Targets) -> None:
    rows = expected_rows(logits, targets)
    wanted = targets.entropy.astype(bool)

    assert close(selected.logprobs, rows[np.arange(len(rows)), targets.ids])
    assert close(selected.entropy[wanted], entropies(rows[wanted]))
    assert close(selected.candidate_logprobs, rows[targets.candidate_owners, targets.candidate_ids])
    for place, k in enumerate(targets.top_logprobs.tolist()):
        top_ids, top_logprobs = selected.top_ids[place, :k], selected.top_logprobs[place, :k]
        assert close(top_logprobs, np.sort(rows[place])[::-1][:k])
        assert close(top_logprobs, rows[place, top_ids])
        assert len(set(top_ids.tolist())) == k


MIXED = targets_of(
    rows=[3, 3, 3, 0, 10, 7, 3, 0, 5, 5, 9, 8],
    temperatures=[1.0, 0.5, 1.0, 2.0, 1.0, 1e-30, 1.0, 2.0, 1e30, 1.0, 0.7, 1e-300],
    entropy=[True, True, False, False, True, True, False, True, True, False, False, True],
    top=[0, 3, 1, 0, VOCAB, 2, 5, 0, 4, 0, 7, 1],
    candidates=[[], [0], [1, 1, 2], [], list(range(VOCAB)), [36], [], [5, 4], [3], [], [], [9]],
)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4, 7, 9, 10, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pass_rows", [1, 4, ROWS])
def test_everything_at_once_equals_a_float64_log_softmax(dtype: torch.dtype, chunk_rows: int, pass_rows: int) -> None:
    logits = random_logits(dtype)
    head = RecordingHead(logits.clone())
    selected = score(head, head.hidden, MIXED, chunk_rows, pass_rows)

    assert_all_as_expected(selected, logits, MIXED)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 4, 9, 10, 11, 1000])
def test_the_head_sees_each_row_once_for_each_temperature_in_small_chunks(chunk_rows: int) -> None:
    head = RecordingHead(random_logits())
    score(head, head.hidden, MIXED, chunk_rows)
    pairs = set(zip(MIXED.rows.tolist(), MIXED.temperatures.tolist(), strict=True))

    assert len(pairs) == 9
    chunks = [min(chunk_rows, len(pairs) - start) for start in range(0, len(pairs), chunk_rows)]

    assert head.calls == [rows + -rows % FULL for rows in chunks]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 1e-30, 1e30, 1e-300, 1e-45, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperatures_divide_the_logits(dtype: torch.dtype, temperature: float) -> None:
    logits = random_logits(dtype)
    best = logits.argmax(dim=1).tolist()
    targets = targets_of(
        rows=[*range(ROWS), *range(ROWS)],
        ids=[*best, *range(ROWS)],
        temperatures=[temperature] * (2 * ROWS),
        entropy=[True] * (2 * ROWS),
    )
    head = RecordingHead(logits.clone())

    assert_all_as_expected(score(head, head.hidden, targets, 4), logits, targets)


def test_the_coldest_temperature_leaves_nothing_but_the_best_token() -> None:
    logits = random_logits()
    best = int(logits[2].argmax())
    targets = targets_of([2, 2], ids=[best, (best + 1) % VOCAB], temperatures=[1e-300] * 2, entropy=[True] * 2)
    selected = score(RecordingHead(logits.clone()), torch.arange(ROWS)[:, None].float(), targets, 16)

    assert selected.logprobs[0] == 0.0
    assert selected.logprobs[1] < -1e37
    assert selected.entropy.tolist() == [0.0, 0.0]


def test_the_hottest_temperature_makes_all_tokens_alike() -> None:
    head = RecordingHead(random_logits())
    selected = score(head, head.hidden, targets_of([2, 3], temperatures=[1e30] * 2, entropy=[True] * 2), 16)

    assert close(selected.logprobs, np.full(2, -np.log(VOCAB)))
    assert close(selected.entropy, np.full(2, np.log(VOCAB)))


def test_large_logits_do_not_overflow() -> None:
    logits = random_logits() * 1e30
    targets = targets_of([0, 1, 2], temperatures=[1.0, 1e-9, 1e31], entropy=[True] * 3)
    head = RecordingHead(logits.clone())

    assert_all_as_expected(score(head, head.hidden, targets, 2), logits, targets)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_token_of_probability_zero_has_minus_infinity_and_a_finite_entropy(temperature: float) -> None:
    logits = random_logits()
    logits[:, 5:9] = -INFINITY
    targets = targets_of(
        rows=[1, 1, 2],
        ids=[5, 0, 8],
        temperatures=[temperature] * 3,
        entropy=[True] * 3,
        top=[VOCAB, 0, 1],
        candidates=[[6, 1], [], []],
    )
    head = RecordingHead(logits.clone())
    selected = score(head, head.hidden, targets, 16)

    assert_all_as_expected(selected, logits, targets)
    assert selected.logprobs[[0, 2]].tolist() == [-INFINITY, -INFINITY]
    assert np.isfinite(selected.logprobs[1])
    assert np.isfinite(selected.entropy).all()
    assert selected.candidate_logprobs[0] == -INFINITY
    assert sorted(selected.top_ids[0, -4:].tolist()) == [5, 6, 7, 8]


@pytest.mark.parametrize("bad", [float("nan"), INFINITY])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("chunk_rows", [1, 16])
def test_a_row_with_nan_or_infinity_is_nan_and_the_others_are_untouched(
    bad: float, temperature: float, chunk_rows: int
) -> None:
    logits = random_logits()
    clean = targets_of([0, 1, 2, 3, 4], temperatures=[temperature] * 5, entropy=[True] * 5, candidates=[[0]] * 5)
    head = RecordingHead(logits.clone())
    before = score(head, head.hidden, clean, chunk_rows)
    head.logits = logits.clone()
    head.logits[2, 30] = bad
    after = score(head, head.hidden, clean, chunk_rows)
    others = [0, 1, 3, 4]

    assert np.isnan(after.logprobs[2])
    assert np.isnan(after.candidate_logprobs[2])
    assert after.logprobs[others].tolist() == before.logprobs[others].tolist()
    assert after.entropy[others].tolist() == before.entropy[others].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_token_has_the_same_float_wherever_it_is_asked_for(dtype: torch.dtype, temperature: float) -> None:
    ids = [3, 20, 36, 0]
    targets = targets_of(
        rows=[4, 4, 5, 6],
        ids=ids,
        temperatures=[temperature] * 4,
        top=[VOCAB] * 4,
        candidates=[[token] for token in ids],
    )
    head = RecordingHead(random_logits(dtype))
    selected = score(head, head.hidden, targets, 3)
    in_top = [
        dict(zip(top_ids.tolist(), logprobs.tolist(), strict=True))[token]
        for token, top_ids, logprobs in zip(ids, selected.top_ids, selected.top_logprobs, strict=True)
    ]

    assert selected.logprobs.tolist() == selected.candidate_logprobs.tolist() == in_top


@pytest.mark.parametrize("chunk_rows", [1, 3, 16])
def test_what_else_is_asked_does_not_change_a_bit(chunk_rows: int) -> None:
    head = RecordingHead(random_logits())
    alone = score(head, head.hidden, targets_of([6, 7], ids=[1, 2], entropy=[True, True]), chunk_rows)
    head = RecordingHead(random_logits())
    targets = targets_of(
        rows=[6, 0, 7, 6, 6],
        ids=[1, 3, 2, 1, 8],
        entropy=[True] * 5,
        top=[0, 9, 0, 0, 3],
        candidates=[[], [1, 2], [], [], [5]],
        temperatures=[1.0, 1.0, 1.0, 0.5, 1.0],
    )
    together = score(head, head.hidden, targets, chunk_rows)

    assert together.logprobs[[0, 2]].tolist() == alone.logprobs.tolist()
    assert together.entropy[[0, 2]].tolist() == alone.entropy.tolist()


def test_a_bfloat16_head_is_normalized_in_float32() -> None:
    logits = random_logits(torch.bfloat16, vocab=5000)
    head = RecordingHead(logits.clone())
    targets = targets_of([0, 1, 2], ids=[4000, 5, 4999])
    selected = score(head, head.hidden, targets, 2)
    expected = expected_rows(logits, targets)[np.arange(3), targets.ids]

    assert np.abs(selected.logprobs - expected).max() < 1e-5


def test_nothing_asked_beside_logprobs_gives_empty_arrays() -> None:
    head = RecordingHead(random_logits())
    selected = score(head, head.hidden, targets_of([1, 2]), 16)

    assert selected.top_ids.shape == selected.top_logprobs.shape == (2, 0)
    assert selected.candidate_logprobs.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equally_likely_tokens_the_lower_ids_come_first_whatever_else_is_asked(dtype: torch.dtype) -> None:
    logits = random_logits().mul(2).round().to(dtype)
    logits[3] = 0
    head = RecordingHead(logits.clone())
    few = score(head, head.hidden, targets_of([3, 5], top=[4, 6]), 16)
    many = score(head, head.hidden, targets_of([3, 5, 7], top=[VOCAB, 9, 1]), 16)
    ranks = [sorted(range(VOCAB), key=lambda token: (-float(logits[row, token]), token)) for row in (3, 5)]

    assert [few.top_ids[place, :k].tolist() for place, k in enumerate((4, 6))] == [ranks[0][:4], ranks[1][:6]]
    assert [many.top_ids[place, :k].tolist() for place, k in enumerate((VOCAB, 9))] == [ranks[0], ranks[1][:9]]
    assert few.top_logprobs[0, :4].tolist() == many.top_logprobs[0, :4].tolist()
