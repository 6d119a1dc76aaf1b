"""Owns the worker processes: start, readiness, replacement, and the retry of what a dead one took along.

A worker is a process of its own (it owns a CUDA context that a fault can poison), reached through a
socket pair. Nothing here knows what a batch means.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import structlog

from logprobd.messages import Loading, Ready, Refused, Scored, Start
from logprobd.sequences import Failure, Outcome, Sequence
from logprobd.settings import ModelSettings

State = Literal["starting", "ready", "stopped"]

FIRST_BACK_OFF_SECONDS, LONGEST_BACK_OFF_SECONDS = 1.0, 30.0

# MKL's kernels depend on the number of rows unless it is asked for strictly reproducible ones (which cost
# nothing measurable): with them a sequence gets the same bits whatever shares its batch.
REPRODUCIBLE_MKL = {"MKL_CBWR": "AUTO,STRICT"}

log = structlog.get_logger(__name__)


class WorkerDiedError(Exception):
    """The worker ended before it gave its batch back."""


class NeverStartedError(WorkerDiedError):
    """The worker ended while the batch was still waiting behind another one: it cannot have been the cause."""


class ModelRefused(Exception):  # noqa: N818 - an outcome of a start, not a fault of the program
    """No worker will ever serve this model; the message says why."""


@dataclass(eq=False)
class _Process:
    """One life of a worker: its process and our end of the socket pair."""

    process: asyncio.subprocess.Process
    connection: "Connection[Any, Any]"

    def kill(self) -> None:
        """Not by asyncio's own kill: that polls first, and may take the exit status from whoever waits for it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)


@dataclass(eq=False)
class Worker:
    """One device's worker process, started again whenever it ends."""

    start_message: Start
    state: State = "starting"
    ready: Ready | None = None
    last_batch_succeeded: bool = True
    last_scored: Scored | None = None
    _process: _Process | None = None
    _usable: asyncio.Event = field(default_factory=asyncio.Event)
    # Threads of its own: a blocking receive must not wait behind another worker's, nor the next batch behind it.
    _sending: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "worker-send"))
    _receiving: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "worker-receive"))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _in_flight: list[object] = field(default_factory=list)  # batches sent and not answered; the first one runs

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.process.pid

    async def wait_until_ready(self) -> Ready:
        await self._usable.wait()
        assert self.ready is not None, "a usable worker has said what it serves. This is a bug."
        return self.ready

    async def keep_alive(self) -> None:
        """Start the process, and again whenever it ends; raises ModelRefused if that is pointless."""
        back_off = FIRST_BACK_OFF_SECONDS
        while True:
            self._process = await spawn()
            try:
                await self._shake_hands(self._process)
                back_off = FIRST_BACK_OFF_SECONDS
                code = await self._process.process.wait()
                log.error("worker ended", device=self.start_message.device, **how_it_ended(code))
            except WorkerDiedError:
                code = await self._process.process.wait()
                log.error(
                    "worker ended while starting",
                    device=self.start_message.device,
                    retry_in_seconds=back_off,
                    **how_it_ended(code),
                )
                await asyncio.sleep(back_off)
                back_off = min(2 * back_off, LONGEST_BACK_OFF_SECONDS)
            finally:
                self.state = "starting"
                self._usable.clear()
                self._process.kill()
                self._process.connection.close()

    async def _shake_hands(self, process: _Process) -> None:
        """Tell the process what to load and wait until it serves it."""
        self._in_flight.clear()
        try:
            message = await self._exchange(process, self.start_message)
            while isinstance(message, Loading):
                log.info(message.step, device=self.start_message.device, pid=process.process.pid)
                message = await self._receive(process)
        except (EOFError, OSError) as error:
            raise WorkerDiedError from error
        if isinstance(message, Refused):
            raise ModelRefused(message.reason)
        self.ready = message
        self.state = "ready"
        self.last_batch_succeeded = True
        self._usable.set()
        log_ready(message, process.process.pid)

    async def score(self, sequences: list[Sequence]) -> list[Outcome]:
        """One batch through the process, when it is up; another one may be sent before its answer is there.

        Raises WorkerDiedError if the process dies of it, NeverStartedError if of the batch before it.
        """
        await self._usable.wait()
        process, ticket = self._process, object()
        assert process is not None, "a usable worker has a process. This is a bug."
        self._in_flight.append(ticket)
        try:
            scored: Scored = await self._exchange(process, sequences)
        except (EOFError, OSError) as error:
            self._usable.clear()  # until keep_alive has started another
            self.last_batch_succeeded = False
            process.kill()
            raise (WorkerDiedError if self._in_flight[:1] == [ticket] else NeverStartedError) from error
        self._in_flight.remove(ticket)
        self.last_batch_succeeded = True
        self.last_scored = replace(scored, outcomes=())  # for /info
        return list(scored.outcomes)

    async def _exchange(self, process: _Process, message: object) -> Any:
        loop = asyncio.get_running_loop()
        async with self._turn:  # answers come in the order of the messages
            await loop.run_in_executor(self._sending, partial(process.connection.send, message))
            answer = self._receive(process)
        return await answer

    def _receive(self, process: _Process) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._receiving, process.connection.recv)

    async def stop(self) -> None:
        """Kill the process for good."""
        self.state = "stopped"
        self._usable.clear()
        if self._process is not None:
            self._process.kill()
            await self._process.process.wait()
        self._sending.shutdown(wait=False)
        self._receiving.shutdown(wait=False)


class Supervisor:
    """All workers, one a device."""

    def __init__(self, settings: ModelSettings) -> None:
        self.workers = [Worker(message) for message in start_messages(settings)]

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
        waits = [asyncio.ensure_future(worker.wait_until_ready()) for worker in self.workers]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()

    async def score(self, worker: Worker, sequences: list[Sequence]) -> list[Outcome]:
        """Outcomes of a batch, whatever it does to the worker.

        A batch that kills its worker is tried once more, then split, until only the sequence that kills
        workers is left.
        """
        deaths = 0
        while deaths < 2:
            try:
                return await worker.score(sequences)
            except NeverStartedError:
                continue
            except WorkerDiedError:
                deaths += 1
                log.warning("a batch lost its worker", sequences=len(sequences), device=worker.start_message.device)
        if len(sequences) == 1:
            return [Failure("worker_crashed", "the worker process died of this sequence twice")]
        middle = len(sequences) // 2
        return await self.score(worker, sequences[:middle]) + await self.score(worker, sequences[middle:])


def start_messages(settings: ModelSettings) -> list[Start]:
    """One start message a device. Workers on the CPU share its cores, since threads that compete are slow."""
    names = [name.strip() for name in settings.devices.split(",")]
    num_cpu = names.count("cpu")
    threads = max(1, (os.cpu_count() or 1) // num_cpu) if num_cpu > 1 else None
    return [Start(settings, name, threads if name == "cpu" else None) for name in names]


async def spawn() -> _Process:
    """Start a worker process that holds the other end of a socket pair."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "logprobd.engine.worker",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            env=REPRODUCIBLE_MKL | os.environ,
        )
    finally:
        theirs.close()  # the process's death must reach us as the end of the stream
    return _Process(process, Connection(ours.detach()))


def how_it_ended(code: int) -> dict[str, int]:
    return {"signal": -code} if code < 0 else {"exit_code": code}


def log_ready(ready: Ready, pid: int) -> None:
    log.info(
        "worker ready",
        model=ready.model.id,
        fingerprint=ready.model.fingerprint,
        device=ready.device,
        pid=pid,
        precision=ready.model.precision,
        layout=ready.selftest.layout,
        max_error=ready.selftest.max_error,
    )
