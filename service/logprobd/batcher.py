"""Admits jobs under a token limit, hands batches to whoever has a free worker, and answers each waiter once.

It never sleeps to wait for company: a batch grows while the one before it runs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from logprobd.admission import Admission
from logprobd.errors import ApiError
from logprobd.messages import Layout
from logprobd.sequences import Failure, Outcome, Scores, Sequence
from logprobd.waiting import Entry, Job, Waiting

Score = Callable[[list[Sequence]], Awaitable[list[Outcome]]]


log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch that was answered, in numbers: of `sequence_tokens` in all, `computed_tokens` went through the model.

    `queue_seconds` says how long the jobs that it was the first batch of had waited.
    """

    sequences: int
    sequence_tokens: int
    computed_tokens: int
    scored_tokens: int
    queue_seconds: list[float]
    forward_seconds: float


class Batcher:
    """One queue in front of all workers."""

    def __init__(
        self,
        *,
        max_batch_tokens: int,
        max_queued_tokens: int,
        layout: Layout,
        ran: Callable[[Ran], None] = lambda _ran: None,
    ) -> None:
        self._ran = ran
        self._admission = Admission(max_queued_tokens)
        self._waiting = Waiting(max_batch_tokens, layout)
        self._waiters: dict[Job, asyncio.Future[None]] = {}
        self._arrived = asyncio.Event()

    @property
    def tokens(self) -> int:
        """Tokens admitted and not yet answered."""
        return self._admission.tokens

    @property
    def num_jobs(self) -> int:
        """Requests admitted and not yet answered."""
        return len(self._waiters)

    @property
    def num_sequences(self) -> int:
        """Sequences that wait or run."""
        return sum(job.num_unanswered for job in self._waiters)

    async def submit(self, job: Job) -> list[Outcome]:
        """All outcomes of a job, in order. Cancelling the call takes its waiting sequences out of the queue."""
        self._admission.take(job.tokens)
        job.admitted_at = time.perf_counter()
        waiter = self._waiters[job] = asyncio.get_running_loop().create_future()
        try:
            for _ in self._waiting.adding(job):
                await asyncio.sleep(0)
            self._arrived.set()
            self._settle_if_answered(job)
            await waiter
        finally:
            self._admission.tokens -= sum(job.costs[index] for index in self._waiting.remove(job))
            self._waiters.pop(job, None)
            job.answered_at = time.perf_counter()
        return job.all_outcomes()

    async def serve(self, score: Score, usable: asyncio.Event, *, ahead: bool = False) -> None:
        """Feed one worker for ever, whenever it is usable: take, run, give back.

        `ahead`: only when what waits fills a batch, so that a second one can be on its way while one runs, and
        nobody rides along in a smaller batch than by waiting.
        """
        while True:
            await usable.wait()  # what a worker that is down would hold is better left to those that are up
            entries = self._waiting.take() if not ahead or self._waiting.fills_a_batch() else []
            if not entries:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            started = time.perf_counter()
            waited = [started - job.admitted_at for job in first_batches(entries, started)]
            sequences = [entry.sequence for entry in entries]
            outcomes = await self._outcomes(score, sequences)
            tokens = sum(entry.job.costs[entry.index] for entry in entries)
            self._ran(counted(sequences, outcomes, waited, self._admission.measure(tokens, started)))
            self._answer(entries, outcomes)

    async def _outcomes(self, score: Score, sequences: list[Sequence]) -> list[Outcome]:
        """The outcomes of a batch; whatever goes wrong becomes the outcome of each of its sequences."""
        try:
            return await score(sequences)
        except Exception:
            log.exception("a batch failed", sequences=len(sequences))
            return [Failure("internal", "the batch failed; the log says why")] * len(sequences)

    def _answer(self, entries: list[Entry], outcomes: list[Outcome]) -> None:
        for entry, outcome in zip(entries, outcomes, strict=True):
            self._admission.tokens -= entry.job.costs[entry.index]
            entry.job.answer(entry.index, outcome)
        for job in {entry.job for entry in entries}:
            self._settle_if_answered(job)

    def give_up(self, error: ApiError) -> None:
        """Answer everybody who still waits with an error."""
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(error)

    def _settle_if_answered(self, job: Job) -> None:
        waiter = self._waiters.get(job)
        if job.num_unanswered == 0 and waiter is not None and not waiter.done():
            waiter.set_result(None)


def first_batches(entries: list[Entry], started: float) -> list[Job]:
    """The jobs of which nothing ran before, which from now on have a start."""
    jobs = {entry.job for entry in entries if not entry.job.started_at}
    for job in jobs:
        job.started_at = started
    return list(jobs)


def counted(
    sequences: list[Sequence], outcomes: list[Outcome], queue_seconds: list[float], forward_seconds: float
) -> Ran:
    """The numbers of a batch."""
    scores = [outcome for outcome in outcomes if isinstance(outcome, Scores)]
    return Ran(
        sequences=len(sequences),
        sequence_tokens=sum(sequence.num_tokens for sequence in sequences),
        computed_tokens=sum(outcome.computed_tokens for outcome in scores),
        scored_tokens=sum(len(outcome.logprobs) for outcome in scores),
        queue_seconds=queue_seconds,
        forward_seconds=forward_seconds,
    )
