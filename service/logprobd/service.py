"""The service without HTTP: workers, queue and the model they serve, from start to drain."""

import asyncio
from functools import partial

import structlog

from logprobd.batcher import Batcher
from logprobd.dialects.native import ServedModel
from logprobd.errors import ApiError
from logprobd.messages import Ready
from logprobd.sequences import Outcome
from logprobd.settings import ServeSettings
from logprobd.supervisor import ModelRefused, Supervisor, Worker
from logprobd.tokenizer import Tokenizer
from logprobd.waiting import Job

log = structlog.get_logger(__name__)


class Service:
    """What the routes talk to."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings)
        self.draining = False
        self.ready: Ready | None = None
        self._served: ServedModel | None = None
        self._batcher: Batcher | None = None

    async def run(self) -> None:
        """Serve until cancelled; raises ModelRefused if the model cannot be served."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.supervisor.run())
                ready = await self.supervisor.first_ready()
                batcher = self._open(ready)
                for worker in self.supervisor.workers:
                    for ahead in (False, True):
                        group.create_task(batcher.serve(partial(self.supervisor.score, worker), ahead=ahead))
        except* ModelRefused as refused:
            raise refused.exceptions[0] from None

    def _open(self, ready: Ready) -> Batcher:
        """Take requests from now on."""
        limit = self.settings.max_sequence_tokens or ready.model.max_positions
        fits = ready.memory.longest_sequence
        if limit > ready.model.max_positions:
            raise ModelRefused(
                f"--max-sequence-tokens {limit} is more than the {ready.model.max_positions} positions of the model"
            )
        if fits < limit:
            log.warning("the memory limit allows shorter sequences only", wanted=limit, longest_sequence=fits)
        tokenizer = None if ready.tokenizer.json is None else Tokenizer(ready.tokenizer)
        self._batcher = Batcher(
            max_batch_tokens=self.max_batch_tokens(ready),
            max_queued_tokens=self.settings.max_queued_tokens,
            layout=ready.selftest.layout,
        )
        self.ready = ready
        self._served = ServedModel(ready.model, tokenizer, min(limit, fits))
        return self._batcher

    def max_batch_tokens(self, ready: Ready) -> int:
        """The tokens that make a batch full: as set, or what a pass may have."""
        return self.settings.max_batch_tokens or ready.memory.max_pass_tokens

    @property
    def served(self) -> ServedModel:
        """The model, for a request that may be taken now; raises ApiError if none may."""
        if self.draining:
            raise ApiError("draining", "the service is stopping and takes no new requests")
        if self._served is None:
            raise ApiError("not_ready", "the model is loading")
        return self._served

    @property
    def queue(self) -> dict[str, int]:
        """What is admitted and not yet answered."""
        batcher = self._batcher
        return {"requests": batcher.num_jobs, "tokens": batcher.tokens} if batcher else {"requests": 0, "tokens": 0}

    async def score(self, job: Job) -> list[Outcome]:
        """All outcomes of a job within the time that a request has."""
        assert self._batcher is not None, "a job for a service that is not open. This is a bug."
        try:
            async with asyncio.timeout(self.settings.request_timeout):
                return await self._batcher.submit(job)
        except TimeoutError:
            raise ApiError(
                "timeout", f"the request was not answered within {self.settings.request_timeout:g} seconds"
            ) from None

    async def drain(self) -> None:
        """Take no new requests, and return when those accepted are answered or the time for it is over."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self._batcher is not None and self._batcher.num_jobs:
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("drain timeout passed", unanswered_requests=self._batcher.num_jobs)
                return
            await asyncio.sleep(0.05)


def describe_worker(worker: Worker) -> dict[str, object]:
    described: dict[str, object] = {"device": worker.start_message.device, "pid": worker.pid, "state": worker.state}
    if worker.last_scored is not None:
        described["memory"] = {"used": worker.last_scored.memory_used, "peak": worker.last_scored.memory_peak}
        described["out_of_memory_halvings"] = worker.last_scored.out_of_memory_halvings
    return described
