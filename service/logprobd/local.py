"""The backend of a service on one machine: worker processes behind one queue."""

import asyncio
from collections.abc import Callable
from functools import partial

import structlog

from logprobd.batcher import Batcher, Ran
from logprobd.errors import ApiError
from logprobd.messages import Ready, WorkerStatus
from logprobd.sequences import Outcome
from logprobd.settings import ServeSettings
from logprobd.supervisor import Supervisor
from logprobd.waiting import Job
from logprobd.worker import ModelRefused

log = structlog.get_logger(__name__)


class LocalBackend:
    """Supervisor and batcher, from start to drain."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._supervisor = Supervisor(settings, settings.worker_deadline)
        self._batcher: Batcher | None = None

    async def run(self, opened: Callable[[Ready], None], ran: Callable[[Ran], None]) -> None:
        """Work until cancelled; `opened` hears once of what is served, `ran` of every batch.

        Raises ModelRefused if the model cannot be served, or if `opened` refuses to serve it.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._supervisor.run())
                ready = await self._supervisor.first_ready()
                opened(ready)
                batcher = self._batcher = Batcher(
                    max_batch_tokens=max_batch_tokens(self._settings, ready),
                    max_queued_tokens=self._settings.max_queued_tokens,
                    layout=ready.selftest.layout,
                    ran=ran,
                )
                for worker in self._supervisor.workers:
                    for ahead in (False, True):
                        score = partial(self._supervisor.score, worker)
                        group.create_task(batcher.serve(score, worker.usable, ahead=ahead))
        except* ModelRefused as refused:
            raise refused.exceptions[0] from None

    @property
    def workers(self) -> list[WorkerStatus]:
        return [worker.status for worker in self._supervisor.workers]

    @property
    def is_ready(self) -> bool:
        """Every worker is up and its last batch succeeded."""
        return self._batcher is not None and self._supervisor.is_ready

    @property
    def queue(self) -> dict[str, int]:
        """What is admitted and not yet answered."""
        batcher = self._batcher
        counts = (batcher.num_jobs, batcher.num_sequences, batcher.tokens) if batcher else (0, 0, 0)
        return dict(zip(("requests", "sequences", "tokens"), counts, strict=True))

    async def score(self, job: Job) -> list[Outcome]:
        """All outcomes of a job; raises ApiError if it is not admitted, or given up."""
        assert self._batcher is not None, "a job for a backend that is not open. This is a bug."
        return await self._batcher.submit(job)

    async def drain(self) -> None:
        """Return when what was accepted is answered, or the time for it is over and the rest given up."""
        deadline = asyncio.get_running_loop().time() + self._settings.drain_timeout
        while self._batcher is not None and (waiting := self._batcher.num_jobs):
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("drain timeout passed", unanswered_requests=waiting)
                self._batcher.give_up(ApiError("draining", "the service stopped before this request was answered"))
                return
            await asyncio.sleep(0.05)


def max_batch_tokens(settings: ServeSettings, ready: Ready) -> int:
    """The tokens that make a batch full: as set, or what a pass may have."""
    return settings.max_batch_tokens or ready.memory.max_pass_tokens
