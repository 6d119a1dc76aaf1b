"""The batcher: every waiter is answered exactly once, whatever the workers do."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from logprobd.batcher import Batcher
from logprobd.errors import ApiError
from logprobd.sequences import Failure, Options, Outcome, Scores, Sequence
from logprobd.waiting import Job


def sequence_of(prompt: int, *completion: int) -> Sequence:
    return Sequence(np.array([prompt], dtype=np.int32), np.array(completion, dtype=np.int32), Options())


def job_of(*numbers: int) -> Job:
    """A job of sequences that can be told apart by the id of their only completion token."""
    return Job([sequence_of(number, number) for number in numbers])


def numbers_of(outcomes: list[Outcome]) -> list[int]:
    return [int(outcome.logprobs[0]) for outcome in outcomes if isinstance(outcome, Scores)]


class ScriptedScorer:
    """Answers each sequence with its own number; records the batches, and may be held up or fail."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.fail_with: Exception | None = None

    async def __call__(self, sequences: list[Sequence]) -> list[Outcome]:
        self.batches.append([int(sequence.completion[0]) for sequence in sequences])
        await self.may_run.wait()
        if self.fail_with is not None:
            raise self.fail_with
        return [Scores(s.completion.astype(np.float32), None, None, None, None, 1) for s in sequences]


Body = Callable[[Batcher, ScriptedScorer], Awaitable[None]]


def run_with_batcher(body: Body, *, workers: int = 1, max_queued_tokens: int = 1000) -> None:
    """Run `body` beside a batcher whose workers share one scripted scorer."""

    async def run() -> None:
        batcher = Batcher(max_batch_tokens=8, max_queued_tokens=max_queued_tokens, layout="shared")
        scorer = ScriptedScorer()
        usable = asyncio.Event()
        usable.set()
        serving = [asyncio.create_task(batcher.serve(scorer, usable)) for _ in range(workers)]
        try:
            async with asyncio.timeout(20):
                await body(batcher, scorer)
        finally:
            for task in serving:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    asyncio.run(run())


async def settle() -> None:
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def start(work: Coroutine[Any, Any, list[Outcome]]) -> asyncio.Task[list[Outcome]]:
    return asyncio.create_task(work)


@pytest.mark.parametrize("workers", [1, 3])
def test_concurrent_jobs_each_get_their_own_answers(workers: int) -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        jobs = [range(start, start + 5) for start in range(0, 200, 5)]
        answers = await asyncio.gather(*(batcher.submit(job_of(*numbers)) for numbers in jobs))

        assert [numbers_of(outcomes) for outcomes in answers] == [list(numbers) for numbers in jobs]
        assert sorted(number for batch in scorer.batches for number in batch) == list(range(200))
        assert batcher.tokens == 0

    run_with_batcher(body, workers=workers)


def test_a_batch_grows_while_the_one_before_it_runs() -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        scorer.may_run.clear()
        first = start(batcher.submit(job_of(1)))
        await settle()
        others = [start(batcher.submit(job_of(number))) for number in (2, 3, 4)]
        await settle()
        scorer.may_run.set()
        await asyncio.gather(first, *others)

        assert scorer.batches == [[1], [2, 3, 4]]

    run_with_batcher(body)


def test_an_empty_job_is_answered_at_once() -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        assert await batcher.submit(job_of()) == []
        assert scorer.batches == []

    run_with_batcher(body)


def test_a_failing_batch_fails_its_own_sequences_and_nothing_else() -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        scorer.fail_with = RuntimeError("boom")
        outcomes = await batcher.submit(job_of(1, 2))
        scorer.fail_with = None

        assert [outcome.code for outcome in outcomes if isinstance(outcome, Failure)] == ["internal"] * 2
        assert numbers_of(await batcher.submit(job_of(3))) == [3]
        assert batcher.tokens == 0

    run_with_batcher(body)


def test_a_job_whose_caller_is_gone_never_reaches_a_worker() -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        scorer.may_run.clear()
        first = start(batcher.submit(job_of(1)))
        await settle()
        abandoned = [start(batcher.submit(job_of(number))) for number in range(10, 210)]
        await settle()
        for task in abandoned:
            task.cancel()
        await settle()

        assert batcher.num_jobs == 1
        assert batcher.tokens == 2

        scorer.may_run.set()
        await first

        assert scorer.batches == [[1]]

    run_with_batcher(body)


def test_a_caller_who_leaves_during_the_batch_leaves_the_others_in_it() -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        scorer.may_run.clear()
        blocker = start(batcher.submit(job_of(0)))
        await settle()
        leaves, stays = start(batcher.submit(job_of(1))), start(batcher.submit(job_of(2)))
        await settle()
        scorer.may_run.set()
        await blocker
        scorer.may_run.clear()
        await settle()
        leaves.cancel()
        scorer.may_run.set()

        assert numbers_of(await stays) == [2]
        assert scorer.batches == [[0], [1, 2]]
        assert batcher.tokens == 0

    run_with_batcher(body)


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async def body(batcher: Batcher, scorer: ScriptedScorer) -> None:
        scorer.may_run.clear()
        waiting = start(batcher.submit(job_of(1, 2, 3, 4)))
        await settle()
        with pytest.raises(ApiError, match="8 tokens are queued") as refusal:
            await batcher.submit(job_of(5, 6))
        scorer.may_run.set()

        assert refusal.value.code == "overloaded"
        assert refusal.value.retry_after is not None
        assert refusal.value.retry_after >= 1
        assert numbers_of(await waiting) == [1, 2, 3, 4]
        assert numbers_of(await batcher.submit(job_of(5, 6))) == [5, 6]

    run_with_batcher(body, max_queued_tokens=10)


def test_a_request_that_no_queue_could_hold_is_refused_for_good() -> None:
    async def body(batcher: Batcher, _scorer: ScriptedScorer) -> None:
        with pytest.raises(ApiError, match="12 tokens; the limit is 10") as refusal:
            await batcher.submit(job_of(1, 2, 3, 4, 5, 6))

        assert refusal.value.code == "request_too_large"
        assert refusal.value.retry_after is None

    run_with_batcher(body, max_queued_tokens=10)
