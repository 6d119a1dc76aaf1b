"""Selective logprobs where each of several ranks has the logits of a part of the vocabulary."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import numpy as np
import pytest
import torch

from logprobd.engine.ranks import Ranks, Vocabulary
from logprobd.engine.selective import Selected, Targets, select
from test_selective import (
    MIXED,
    ROWS,
    VOCAB,
    RecordingHead,
    assert_all_as_expected,
    close,
    expected_rows,
    random_logits,
    targets_of,
)


@dataclass
class Meeting:
    """Where the threads that stand for ranks exchange tensors."""

    size: int
    brought: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.size, timeout=30)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.brought[rank] = tensor.clone()
        self.barrier.wait()
        everything = [self.brought[number] for number in range(self.size)]
        self.barrier.wait()
        return everything


@dataclass(frozen=True)
class ThreadRank(Ranks):
    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.meeting.exchange(self.rank, tensor)).sum(dim=0))

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        # As gloo and NCCL may do it: a NaN is lost.
        everybody = torch.stack(self.meeting.exchange(self.rank, tensor))
        return tensor.copy_(everybody.masked_fill(everybody.isnan(), -torch.inf).amax(dim=0))

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim=1)


def together(logits: torch.Tensor, targets: Targets, size: int, chunk_rows: int = 4) -> list[Selected]:
    """What every rank makes of it; each has equal stretches of the vocabulary, the last a shorter one."""
    parts = logits.split(-(-logits.shape[1] // size), dim=1)
    meeting = Meeting(len(parts))

    def of_rank(rank: int) -> Selected:
        head = RecordingHead(parts[rank].clone())
        vocabulary = Vocabulary(rank * parts[0].shape[1], ThreadRank(rank, len(parts), None, meeting))
        return select(head, [(0, head.hidden)], targets, chunk_rows, logits.device, vocabulary)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(of_rank, range(len(parts))))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_the_vocabulary_give_everything_that_the_whole_gives(dtype: torch.dtype, size: int) -> None:
    logits = random_logits(dtype)

    for selected in together(logits, MIXED, size):
        assert_all_as_expected(selected, logits, MIXED)


def test_ranks_are_counted_over_all_parts() -> None:
    logits = random_logits()
    targets = targets_of(rows=list(range(ROWS)), ranks=[True] * ROWS)
    rows = expected_rows(logits, targets)
    likelier = (rows > rows[np.arange(ROWS), targets.ids][:, None]).sum(axis=1)

    for selected in together(logits, targets, 3):
        assert selected.ranks.tolist() == (likelier + 1).tolist()


def test_of_equals_the_lower_id_comes_first_across_parts() -> None:
    logits = torch.zeros(ROWS, VOCAB)
    logits[:, [30, 12, 2]] = 1.0

    for selected in together(logits, targets_of(rows=[0, 1], top=[6, 6]), 3):
        assert selected.top_ids.tolist() == [[2, 12, 30, 0, 1, 3]] * 2


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, VOCAB - 1])
def test_a_broken_logit_in_one_part_breaks_its_row_and_no_other(broken: float, place: int) -> None:
    logits = random_logits()
    logits[4, place] = broken
    targets = targets_of(rows=[3, 4, 5], ids=[1, 1, 1])

    for selected in together(logits, targets, 2):
        assert np.isnan(selected.logprobs).tolist() == [False, True, False]


def test_masked_logits_are_minus_infinity_wherever_they_are() -> None:
    logits = random_logits()
    logits[:, : VOCAB // 2 + 1] = -torch.inf  # all of the first part
    targets = targets_of(rows=[0, 1], ids=[1, VOCAB - 1], entropy=[True, True])
    rows = expected_rows(logits, targets)

    for selected in together(logits, targets, 2):
        assert close(selected.logprobs, rows[[0, 1], targets.ids])
        assert np.isfinite(selected.entropy).all()


def test_a_rank_alone_exchanges_nothing() -> None:
    asked: list[Callable[[torch.Tensor], torch.Tensor]] = [Ranks().add, Ranks().maximum, Ranks().join]
    tensor = torch.ones(2, 3)

    assert all(ask(tensor) is tensor for ask in asked)
    assert (Ranks().most(7), Ranks().least(7)) == (7, 7)
