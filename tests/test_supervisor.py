"""What becomes of a batch whose worker dies: tried again, then split until only the culprit is left."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from logprobd.sequences import Failure, Options, Outcome, Scores, Sequence
from logprobd.settings import ModelSettings
from logprobd.supervisor import Supervisor, start_messages
from logprobd.worker import NeverStartedError, Worker, WorkerDiedError


def sequence_of(number: int) -> Sequence:
    ids = np.array([number], dtype=np.int32)
    return Sequence(ids, ids, Options())


@dataclass
class ScriptedWorker:
    """Dies of every batch that holds a poisonous sequence, and of the first `deaths` batches anyway."""

    poison: set[int]
    deaths: int = 0
    losses: int = 0
    batches: list[list[int]] = field(default_factory=list)
    name: str = "0:cpu"
    usable: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.usable.set()

    async def score(self, sequences: list[Sequence]) -> list[Outcome]:
        numbers = [int(sequence.completion[0]) for sequence in sequences]
        self.batches.append(numbers)
        if self.losses:
            self.losses -= 1
            raise NeverStartedError
        if self.deaths or self.poison & set(numbers):
            self.deaths = max(0, self.deaths - 1)
            raise WorkerDiedError
        return [Scores(s.completion.astype(np.float32), None, None, None, None, 1) for s in sequences]


def score(worker: ScriptedWorker, numbers: range, *others: ScriptedWorker) -> list[Outcome]:
    sequences = [sequence_of(number) for number in numbers]
    supervisor = Supervisor(ModelSettings())
    supervisor.workers = [cast(Worker, each) for each in (worker, *others)]
    return asyncio.run(supervisor.score(supervisor.workers[0], sequences))


def test_a_batch_that_lost_its_worker_once_is_tried_again_whole() -> None:
    worker = ScriptedWorker(poison=set(), deaths=1)
    outcomes = score(worker, range(5))

    assert [outcome.logprobs[0] for outcome in outcomes if isinstance(outcome, Scores)] == [0, 1, 2, 3, 4]
    assert worker.batches == [[0, 1, 2, 3, 4]] * 2


def test_a_batch_that_lost_its_worker_goes_to_whichever_is_up() -> None:
    down, up = ScriptedWorker(poison=set(), deaths=1), ScriptedWorker(poison=set())
    down.usable.clear()
    outcomes = score(down, range(3), up)

    assert [outcome.logprobs[0] for outcome in outcomes if isinstance(outcome, Scores)] == [0, 1, 2]
    assert (down.batches, up.batches) == ([[0, 1, 2]], [[0, 1, 2]])


def test_looking_for_what_kills_workers_costs_one_death_a_level() -> None:
    worker = ScriptedWorker(poison={5})
    score(worker, range(8))

    assert [len(batch) for batch in worker.batches if 5 in batch] == [8, 8, 4, 2, 1]


def test_a_batch_lost_behind_another_one_is_not_counted_against_it() -> None:
    worker = ScriptedWorker(poison=set(), deaths=1, losses=5)
    outcomes = score(worker, range(3))

    assert [outcome.logprobs[0] for outcome in outcomes if isinstance(outcome, Scores)] == [0, 1, 2]
    assert worker.batches == [[0, 1, 2]] * 7


@pytest.mark.parametrize("poison", [{0}, {6}, {12}, {3, 4}, {0, 12}])
def test_only_the_sequence_that_kills_workers_fails(poison: set[int]) -> None:
    outcomes = score(ScriptedWorker(poison), range(13))

    for number, outcome in enumerate(outcomes):
        if number in poison:
            assert isinstance(outcome, Failure)
            assert outcome.code == "worker_crashed"
        else:
            assert isinstance(outcome, Scores)
            assert outcome.logprobs[0] == number


def test_workers_on_the_cpu_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    assert [start.threads for start in start_messages(ModelSettings(devices="cpu,cpu"))] == [4, 4]
    assert [start.threads for start in start_messages(ModelSettings(devices="cpu"))] == [None]
    assert [start.threads for start in start_messages(ModelSettings(devices="cpu+cpu,cpu+cpu"))] == [2, 2]
    assert [start.device for start in start_messages(ModelSettings(devices="cuda:0, cuda:1"))] == ["cuda:0", "cuda:1"]
    assert [start.device for start in start_messages(ModelSettings(devices="cpu + cpu,cpu"))] == ["cpu+cpu", "cpu"]
