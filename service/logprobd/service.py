"""The service without HTTP: the model that it serves, every limit, and the backend that computes."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from logprobd.batcher import Ran
from logprobd.dialects.plans import ServedModel
from logprobd.errors import ApiError
from logprobd.large_bodies import Parsing
from logprobd.local import max_batch_tokens
from logprobd.messages import Ready, WorkerStatus
from logprobd.metrics import Metrics
from logprobd.requests import BodyBudget
from logprobd.sequences import MAX_CANDIDATES, MAX_TOP_LOGPROBS, Outcome
from logprobd.settings import ServeSettings
from logprobd.tokenizer import tokenizer_of
from logprobd.waiting import Job
from logprobd.worker import ModelRefused

log = structlog.get_logger(__name__)


class Backend(Protocol):
    """What computes: worker processes here, or replicas elsewhere."""

    @property
    def workers(self) -> list[WorkerStatus]: ...

    @property
    def is_ready(self) -> bool:
        """All that computes is up and its last batch succeeded."""

    @property
    def queue(self) -> dict[str, int]:
        """The requests, sequences and tokens that are admitted and not yet answered."""

    async def run(self, opened: Callable[[Ready], None], ran: Callable[[Ran], None]) -> None:
        """Work until cancelled; `opened` hears once of what is served, `ran` of every batch."""

    async def score(self, job: Job) -> list[Outcome]:
        """All outcomes of a job, in order; raises ApiError if it is not admitted, or given up."""


class Service:
    """What the routes talk to."""

    def __init__(self, settings: ServeSettings, backend: Backend) -> None:
        self.settings = settings
        self._backend = backend
        self.bodies = BodyBudget(settings.max_body_bytes)
        self.metrics = Metrics(self)
        self.stop_asked = asyncio.Event()
        self.draining = False  # whoever runs the service sets it: nothing new is taken from then on
        self.ready: Ready | None = None
        self._served: ServedModel | None = None
        self._parsing: Parsing | None = None

    async def run(self) -> None:
        """Serve until cancelled; raises ModelRefused if the model cannot be served."""
        try:
            await self._backend.run(self._open, self.metrics.ran)
        finally:
            if self._parsing is not None:
                await self._parsing.stop()

    def _open(self, ready: Ready) -> None:
        """Take requests from now on; raises ModelRefused if the settings ask for more than the model has."""
        limit = self.settings.max_sequence_tokens or ready.model.max_positions
        fits = ready.memory.longest_sequence
        if limit > ready.model.max_positions:
            raise ModelRefused(
                f"--max-sequence-tokens {limit} is more than the {ready.model.max_positions} positions of the model"
            )
        if fits < limit:
            log.warning("the memory limit allows shorter sequences only", wanted=limit, longest_sequence=fits)
        self.ready = ready
        self._served = ServedModel(
            ready.model, tokenizer_of(ready.tokenizer), min(limit, fits), self.settings.max_request_sequences
        )
        self._parsing = Parsing(self._served, ready.tokenizer)

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
    def workers(self) -> list[WorkerStatus]:
        return self._backend.workers

    @property
    def is_ready(self) -> bool:
        return self.ready is not None and self._backend.is_ready and not self.draining

    @property
    def queue(self) -> dict[str, int]:
        """What is admitted and not yet answered."""
        return self._backend.queue

    @property
    def limits(self) -> dict[str, int | float]:
        """Every number that a 413, 422 or 429 can name."""
        settings = self.settings
        limits: dict[str, int] = {}
        if self.ready is not None and self._served is not None:
            limits = {
                "max_sequence_tokens": self._served.max_sequence_tokens,
                "max_batch_tokens": max_batch_tokens(settings, self.ready),
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
        return await self._backend.score(job)


def describe_worker(worker: WorkerStatus) -> dict[str, object]:
    described: dict[str, object] = {
        "name": worker.name,
        "device": worker.device,
        "pid": worker.pid,
        "state": worker.state,
        "restarts": worker.restarts,
    }
    if worker.memory_used is not None:
        described["memory"] = {"used": worker.memory_used, "peak": worker.memory_peak}
        described["out_of_memory_halvings"] = worker.out_of_memory_halvings
    return described
