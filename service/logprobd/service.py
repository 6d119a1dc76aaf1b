"""The service without HTTP: workers, queue and the model they serve, from start to drain."""

import asyncio
from functools import partial

import structlog

from logprobd.batcher import Batcher
from logprobd.dialects.plans import ServedModel
from logprobd.errors import ApiError
from logprobd.large_bodies import Parsing
from logprobd.messages import Ready
from logprobd.metrics import Metrics
from logprobd.requests import BodyBudget
from logprobd.sequences import MAX_CANDIDATES, MAX_TOP_LOGPROBS, Outcome
from logprobd.settings import ServeSettings
from logprobd.supervisor import Supervisor
from logprobd.tokenizer import tokenizer_of
from logprobd.waiting import Job
from logprobd.worker import ModelRefused, Worker

log = structlog.get_logger(__name__)


class Service:
    """What the routes talk to."""

    def __init__(self, settings: ServeSettings) -> None:
        self.settings = settings
        self.supervisor = Supervisor(settings, settings.worker_deadline)
        self.bodies = BodyBudget(settings.max_body_bytes)
        self.metrics = Metrics(self)
        self.stop_asked = asyncio.Event()
        self.draining = False
        self.ready: Ready | None = None
        self._served: ServedModel | None = None
        self._batcher: Batcher | None = None
        self._parsing: Parsing | None = None

    async def run(self) -> None:
        """Serve until cancelled; raises ModelRefused if the model cannot be served."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.supervisor.run())
                ready = await self.supervisor.first_ready()
                batcher = self._open(ready)
                for worker in self.supervisor.workers:
                    for ahead in (False, True):
                        score = partial(self.supervisor.score, worker)
                        group.create_task(batcher.serve(score, worker.usable, ahead=ahead))
        except* ModelRefused as refused:
            raise refused.exceptions[0] from None
        finally:
            if self._parsing is not None:
                await self._parsing.stop()

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
        self._batcher = Batcher(
            max_batch_tokens=self.max_batch_tokens(ready),
            max_queued_tokens=self.settings.max_queued_tokens,
            layout=ready.selftest.layout,
            ran=self.metrics.ran,
        )
        self.ready = ready
        self._served = ServedModel(
            ready.model, tokenizer_of(ready.tokenizer), min(limit, fits), self.settings.max_request_sequences
        )
        self._parsing = Parsing(self._served, ready.tokenizer)
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
    def served_before(self) -> ServedModel:
        """The model, for a request that was taken before a drain began."""
        assert self._served is not None, "a request was taken before a model was served. This is a bug."
        return self._served

    @property
    def parsing(self) -> Parsing:
        """What parses bodies, for a request that may be taken now."""
        served, parsing = self.served, self._parsing
        assert parsing is not None, f"{served.info.id} is served and has no parser. This is a bug."
        return parsing

    @property
    def workers(self) -> list[Worker]:
        return self.supervisor.workers

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self.supervisor.is_ready and not self.draining

    @property
    def queue(self) -> dict[str, int]:
        """What is admitted and not yet answered."""
        batcher = self._batcher
        counts = (batcher.num_jobs, batcher.num_sequences, batcher.tokens) if batcher else (0, 0, 0)
        return dict(zip(("requests", "sequences", "tokens"), counts, strict=True))

    @property
    def limits(self) -> dict[str, int | float]:
        """Every number that a 413, 422 or 429 can name."""
        settings = self.settings
        limits: dict[str, int] = {}
        if self.ready is not None and self._served is not None:
            limits = {
                "max_sequence_tokens": self._served.max_sequence_tokens,
                "max_batch_tokens": self.max_batch_tokens(self.ready),
                "max_top_logprobs": min(MAX_TOP_LOGPROBS, self.ready.model.vocab_size),
                "vocab_size": self.ready.model.vocab_size,
            }
        return {
            **limits,
            "max_candidates": MAX_CANDIDATES,
            "max_queued_tokens": settings.max_queued_tokens,
            "max_request_sequences": settings.max_request_sequences,
            "max_body_bytes": settings.max_body_bytes,
            "request_timeout": settings.request_timeout,
        }

    async def score(self, job: Job) -> list[Outcome]:
        """All outcomes of a job."""
        assert self._batcher is not None, "a job for a service that is not open. This is a bug."
        return await self._batcher.submit(job)

    async def drain(self) -> None:
        """Take no new requests, and return when those accepted are answered or the time for it is over."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + self.settings.drain_timeout
        while self._batcher is not None and self._batcher.num_jobs:
            if asyncio.get_running_loop().time() >= deadline:
                log.warning("drain timeout passed", unanswered_requests=self._batcher.num_jobs)
                self._batcher.give_up(ApiError("draining", "the service stopped before this request was answered"))
                return
            await asyncio.sleep(0.05)


def describe_worker(worker: Worker) -> dict[str, object]:
    described: dict[str, object] = {
        "name": worker.name,
        "device": worker.start_message.device,
        "pid": worker.pid,
        "state": worker.state,
        "restarts": worker.restarts,
    }
    if worker.last_scored is not None:
        described["memory"] = {"used": worker.last_scored.memory_used, "peak": worker.last_scored.memory_peak}
        described["out_of_memory_halvings"] = worker.last_scored.out_of_memory_halvings
    return described
