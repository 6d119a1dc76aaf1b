"""One device's worker: a process that owns a model, started again whenever it ends or is stuck.

It is a process of its own because it owns a CUDA context that a fault can poison. Nothing here knows what a
batch means beyond its number of tokens.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import structlog

from logprobd.messages import Loading, Ready, Refused, Scored, Start, WorkerStatus
from logprobd.own_process import OwnProcess, how_it_ended, spawn
from logprobd.sequences import Outcome, Sequence

State = Literal["starting", "ready", "stopped"]

FIRST_BACK_OFF_SECONDS, LONGEST_BACK_OFF_SECONDS = 1.0, 30.0
TIMES_AS_LONG = 30  # as its tokens took so far, before a batch counts as stuck

log = structlog.get_logger(__name__)


class WorkerDiedError(Exception):
    """The worker ended before it gave its batch back."""


class NeverStartedError(WorkerDiedError):
    """The worker ended while the batch was still waiting behind another one: it cannot have been the cause."""


class ModelRefused(Exception):  # noqa: N818 - an outcome of a start, not a fault of the program
    """No worker will ever serve this model; the message says why."""


@dataclass(eq=False)
class Worker:
    """One device's worker process, and what it said last.

    `deadline` is the least number of seconds until a batch counts as stuck.
    """

    name: str
    start_message: Start
    deadline: float = 30.0
    state: State = "starting"
    ready: Ready | None = None
    last_batch_succeeded: bool = True
    last_scored: Scored | None = None
    restarts: int = 0
    usable: asyncio.Event = field(default_factory=asyncio.Event)
    _process: OwnProcess | None = None
    _in_flight: list[object] = field(default_factory=list)  # batches sent and not answered; the first one runs
    _running_since: float = 0.0
    _seconds_per_token: float = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def status(self) -> WorkerStatus:
        """What /info and /metrics say of it; memory is that of its idle level until a batch was scored."""
        scored, plan = self.last_scored, None if self.ready is None else self.ready.memory
        idle = None if plan is None else plan.idle
        return WorkerStatus(
            name=self.name,
            device=self.start_message.device,
            pid=self.pid,
            state=self.state,
            restarts=self.restarts,
            memory_used=scored.memory_used if scored else idle,
            memory_peak=scored.memory_peak if scored else idle,
            memory_limit=None if plan is None else plan.limit,
            out_of_memory_halvings=scored.out_of_memory_halvings if scored else 0,
        )

    async def keep_alive(self) -> None:
        """Start the process, and again whenever it ends; raises ModelRefused if that is pointless."""
        back_off = FIRST_BACK_OFF_SECONDS
        while True:
            process = self._process = await spawn("logprobd.engine.worker")
            try:
                await self._shake_hands(process)
                back_off = FIRST_BACK_OFF_SECONDS
                code = await process.process.wait()
                log.error("worker ended", worker=self.name, **how_it_ended(code))
            except WorkerDiedError:
                self._put_aside()
                code = await process.process.wait()
                log.error("worker ended while starting", worker=self.name, retry_in=back_off, **how_it_ended(code))
                await asyncio.sleep(back_off)
                back_off = min(2 * back_off, LONGEST_BACK_OFF_SECONDS)
            finally:
                self._put_aside()
                await process.end()
            self.restarts += 1

    def _put_aside(self) -> None:
        self.state = "stopped" if self.state == "stopped" else "starting"
        self.usable.clear()

    async def _shake_hands(self, process: OwnProcess) -> None:
        """Tell the process what to load and wait until it serves it."""
        self._in_flight.clear()
        try:
            message = await process.exchange(self.start_message)
            while isinstance(message, Loading):
                log.info(message.step, worker=self.name, pid=process.pid)
                message = await process.receive()
        except (EOFError, OSError) as error:
            raise WorkerDiedError from error
        if isinstance(message, Refused):
            raise ModelRefused(message.reason)
        self._take_over(message)
        log_ready(message, self.name, process.pid)

    def _take_over(self, ready: Ready) -> None:
        """Serve what the process has loaded, which must be what was served before."""
        if self.ready is not None and ready.model.fingerprint != self.ready.model.fingerprint:
            raise ModelRefused(
                f"the model's weights changed while it was served: a worker that was started again has fingerprint "
                f"{ready.model.fingerprint}, not {self.ready.model.fingerprint}; start the service again to serve it"
            )
        self.ready = ready
        self.state = "ready"
        self.last_batch_succeeded = True
        self._seconds_per_token = max(self._seconds_per_token, ready.seconds_per_token)
        self.usable.set()

    async def score(self, sequences: list[Sequence]) -> list[Outcome]:
        """One batch through the process, when it is up; another one may be sent before its answer is there.

        Raises WorkerDiedError if the process dies of it or is stuck with it, NeverStartedError if with the batch
        before it.
        """
        await self.usable.wait()
        process, ticket = self._process, object()
        assert process is not None, "a usable worker has a process. This is a bug."
        self._in_flight.append(ticket)
        if self._in_flight[0] is ticket:
            self._running_since = time.monotonic()
        tokens = sum(sequence.num_tokens for sequence in sequences)
        try:
            scored = await self._in_time(process, ticket, process.exchange(sequences), tokens)
        except (EOFError, OSError) as error:
            self.usable.clear()  # until keep_alive has started another
            self.last_batch_succeeded = False
            process.kill()
            raise (WorkerDiedError if self._in_flight[:1] == [ticket] else NeverStartedError) from error
        self._measure(ticket, tokens)
        self.last_scored = replace(scored, outcomes=())  # for /info and /metrics
        return list(scored.outcomes)

    async def _in_time(
        self, process: OwnProcess, ticket: object, work: Coroutine[Any, Any, Scored], tokens: int
    ) -> Scored:
        """The answer to a batch; the process is killed if it takes far longer than it should."""
        answer = asyncio.ensure_future(work)
        try:
            while not answer.done():
                allowed = max(self.deadline, TIMES_AS_LONG * self._seconds_per_token * tokens)
                runs = self._in_flight[:1] == [ticket]
                left = allowed - (time.monotonic() - self._running_since if runs else 0.0)
                if left <= 0:
                    log.error("worker is stuck and will be replaced", worker=self.name, seconds=round(allowed, 1))
                    process.kill()
                await asyncio.wait({answer}, timeout=max(left, 0.1))
            return await answer
        finally:
            answer.cancel()

    def _measure(self, ticket: object, tokens: int) -> None:
        """Take note of a batch that came back, and of the speed that it shows."""
        now = time.monotonic()
        seconds, self._running_since = now - self._running_since, now
        self._in_flight.remove(ticket)
        self.last_batch_succeeded = True
        # The slowest so far, forgotten slowly: a batch of a few long rows takes longer a token than one of many.
        self._seconds_per_token = max(0.99 * self._seconds_per_token, seconds / max(tokens, 1))

    async def stop(self) -> None:
        """Kill the process for good."""
        self.state = "stopped"
        self.usable.clear()
        if self._process is not None:
            await self._process.end()


def log_ready(ready: Ready, worker: str, pid: int) -> None:
    log.info(
        "worker ready",
        worker=worker,
        model=ready.model.id,
        fingerprint=ready.model.fingerprint,
        device=ready.device,
        pid=pid,
        precision=ready.model.precision,
        layout=ready.selftest.layout,
        max_error=ready.selftest.max_error,
    )
