"""The batcher as a state machine: submit, cancel, run, fail, in any order; each waiter is answered exactly once."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from logprobd.batcher import Batcher, Ran
from logprobd.errors import ApiError
from logprobd.sequences import Failure, Options, Outcome, Scores, Sequence
from logprobd.waiting import Job

MOST_QUEUED, MOST_IN_A_BATCH = 60, 12


class HeldScorer:
    """Batches that were taken and run until the machine says how they end."""

    def __init__(self) -> None:
        self.running: list[tuple[list[Sequence], asyncio.Future[None]]] = []

    async def __call__(self, sequences: list[Sequence]) -> list[Outcome]:
        ends = asyncio.get_running_loop().create_future()
        self.running.append((sequences, ends))
        await ends
        return [Scores(s.completion.astype(np.float32), None, None, None, None, 1) for s in sequences]


class BatcherMachine(RuleBasedStateMachine):
    """Two workers, one of which also takes batches ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.ran: list[Ran] = []
        self.batcher = Batcher(
            max_batch_tokens=MOST_IN_A_BATCH, max_queued_tokens=MOST_QUEUED, layout="shared", ran=self.ran.append
        )
        self.scorer = HeldScorer()
        self.usable = asyncio.Event()
        self.usable.set()
        self.waiting: dict[asyncio.Task[list[Outcome]], Job] = {}
        self.submitted = 0
        self.serving = [
            self.loop.create_task(self.batcher.serve(self.scorer, self.usable, ahead=ahead))
            for ahead in (False, False, True)
        ]
        self.settle()

    def settle(self) -> None:
        async def turns() -> None:
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    @rule(prompt=st.integers(1, 3), lengths=st.lists(st.integers(0, 9), max_size=8))
    def submit(self, prompt: int, lengths: list[int]) -> None:
        ids = np.full(prompt, prompt, dtype=np.int32)
        job = Job([Sequence(ids, np.full(n, self.submitted, dtype=np.int32), Options()) for n in lengths])
        self.submitted += 1
        queued = self.batcher.tokens
        task = self.loop.create_task(self.batcher.submit(job))
        self.settle()
        if queued + job.tokens > MOST_QUEUED:
            error = task.exception()
            assert isinstance(error, ApiError)
            assert error.code in ("overloaded", "request_too_large")
            assert (error.code == "overloaded") == (error.retry_after is not None)
        else:
            self.waiting[task] = job
            self.collect()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        task = data.draw(st.sampled_from(list(self.waiting)))
        task.cancel()
        self.settle()
        assert task.cancelled()
        del self.waiting[task]

    @precondition(lambda self: self.scorer.running)
    @rule(data=st.data(), fails=st.booleans())
    def end_a_batch(self, data: Any, fails: bool) -> None:
        place = data.draw(st.integers(0, len(self.scorer.running) - 1))
        _, ends = self.scorer.running.pop(place)
        if fails:
            ends.set_exception(RuntimeError("boom"))
        else:
            ends.set_result(None)
        self.settle()
        self.collect()

    @rule()
    def workers_go_down(self) -> None:
        self.usable.clear()

    @rule()
    def workers_come_up(self) -> None:
        self.usable.set()
        self.settle()

    def collect(self) -> None:
        """Take note of who was answered, and that it was with his own."""
        for task in [task for task in self.waiting if task.done()]:
            job = self.waiting.pop(task)
            for sequence, outcome in zip(job.sequences, task.result(), strict=True):
                if isinstance(outcome, Scores):
                    assert outcome.logprobs.tolist() == sequence.completion.tolist()
                else:
                    assert isinstance(outcome, Failure)
                    assert outcome.code == "internal"

    @invariant()
    def the_bound_holds(self) -> None:
        assert 0 <= self.batcher.tokens <= MOST_QUEUED
        assert self.batcher.num_jobs == len(self.waiting)

    def teardown(self) -> None:
        """Whatever happened before: everybody who still waits is answered once the workers go on."""
        self.usable.set()
        for _ in range(200):
            self.settle()
            while self.scorer.running:
                self.scorer.running.pop()[1].set_result(None)
        self.settle()
        self.collect()
        assert not self.waiting
        assert self.batcher.tokens == 0
        for task in self.serving:
            task.cancel()
        self.settle()
        self.loop.close()


TestBatcher = BatcherMachine.TestCase
TestBatcher.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
