"""Owns the workers: one a device, the retry of what a dead one took along, and the search for what kills them."""

import asyncio
import os

import structlog

from logprobd.messages import Ready, Start
from logprobd.sequences import Failure, Outcome, Sequence
from logprobd.settings import ModelSettings
from logprobd.worker import ModelRefused, NeverStartedError, Worker, WorkerDiedError

log = structlog.get_logger(__name__)


class Supervisor:
    """All workers, one a device."""

    def __init__(self, settings: ModelSettings, deadline: float = 30.0) -> None:
        self.workers = [
            Worker(f"{number}:{message.device}", message, deadline)
            for number, message in enumerate(start_messages(settings))
        ]

    @property
    def is_ready(self) -> bool:
        """Every worker is up and its last batch succeeded."""
        return all(worker.state == "ready" and worker.last_batch_succeeded for worker in self.workers)

    async def run(self) -> None:
        """Keep every worker alive until cancelled; raises ModelRefused if one refuses the model."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers:
                    group.create_task(worker.keep_alive())
        except* ModelRefused as refused:
            raise refused.exceptions[0] from None
        finally:
            await asyncio.gather(*(worker.stop() for worker in self.workers))

    async def first_ready(self) -> Ready:
        """What the first worker that is up serves."""
        worker = await self.usable_worker()
        assert worker.ready is not None, "a usable worker has said what it serves. This is a bug."
        return worker.ready

    async def score(self, worker: Worker, sequences: list[Sequence]) -> list[Outcome]:
        """Outcomes of a batch, whatever it does to workers.

        A batch that kills its worker is tried once more, on whichever is up first, then split, until only the
        sequence that kills workers is left.
        """
        for _ in range(2):
            outcomes = await self._try(worker, sequences)
            if outcomes is not None:
                return outcomes
            worker = await self.usable_worker()
        return await self._isolate(sequences)

    async def _isolate(self, sequences: list[Sequence]) -> list[Outcome]:
        """Outcomes of a batch that killed two workers: its halves get one try each, and their halves."""
        if len(sequences) == 1:
            return [Failure("worker_crashed", "the worker process died of this sequence twice")]
        middle = len(sequences) // 2
        outcomes: list[Outcome] = []
        for part in (sequences[:middle], sequences[middle:]):
            tried = await self._try(await self.usable_worker(), part)
            outcomes += await self._isolate(part) if tried is None else tried
        return outcomes

    async def _try(self, worker: Worker, sequences: list[Sequence]) -> list[Outcome] | None:
        """Outcomes of a batch, or None if it killed its worker."""
        while True:
            try:
                return await worker.score(sequences)
            except NeverStartedError:
                worker = await self.usable_worker()
            except WorkerDiedError:
                log.warning("a batch lost its worker", sequences=len(sequences), worker=worker.name)
                return None

    async def usable_worker(self) -> Worker:
        """Whichever worker is up first."""
        waits = {asyncio.ensure_future(worker.usable.wait()): worker for worker in self.workers}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return waits[done.pop()]
        finally:
            for wait in waits:
                wait.cancel()


def start_messages(settings: ModelSettings) -> list[Start]:
    """One start message a worker. Processes on the CPU share its cores, since threads that compete are slow."""
    num_cpu = settings.all_devices.count("cpu")
    threads = max(1, (os.cpu_count() or 1) // num_cpu) if num_cpu > 1 else None
    return [Start(settings, name, threads if "cpu" in name else None) for name in settings.devices.split(",")]
