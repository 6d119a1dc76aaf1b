"""A worker process: owns torch and one device, loads the model, then takes batches and gives outcomes back.

Run as `python -m logprobd.engine.worker FD`, where FD is its end of a socket pair. It ends when the other
end is closed, so it never outlives the service. Where a worker has several devices, this runs once for each: the
service talks to the first process, and the first one to the others.
"""

import os
import pickle
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Queue
from threading import Thread
from traceback import print_exception
from typing import Any, NoReturn

import torch
import transformers

from logprobd.engine.group import Group, Join
from logprobd.engine.memory import costly_batch
from logprobd.engine.meter import Meter
from logprobd.engine.model import ModelRefusedError
from logprobd.engine.preparing import Prepared, prepare
from logprobd.engine.scorer import Scorer
from logprobd.messages import Loading, Ready, Refused, Scored, Start
from logprobd.sequences import Failure, Outcome, Sequence

PROBE_TOKENS = 256


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle: it drains first
    connection: Connection[Any, Any] = Connection(fd)
    try:
        first = connection.recv()
        if isinstance(first, Join):
            follow(connection, first)
        else:
            lead(connection, first)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the service is gone


def lead(connection: "Connection[Any, Any]", start: Start) -> None:
    """Be the process that the service knows: tell it about each step, then serve it."""
    group = Group(start)
    try:
        prepared = prepare(start, group.form, lambda step: connection.send(Loading(step)))
    except ModelRefusedError as error:
        connection.send(Refused(str(error)))
        return
    connection.send(ready(prepared))
    serve(connection, prepared.scorer, prepared.meter, group)


def ready(prepared: Prepared) -> Ready:
    """What the service hears of a model that it may serve."""
    loaded = prepared.scorer.loaded
    # A plain str: torch's own class would have whoever reads it import torch.
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    speed = seconds_per_token(prepared.scorer)
    return Ready(loaded.info, loaded.tokenizer, prepared.selftest, prepared.device, prepared.plan, speed, versions)


def follow(connection: "Connection[Any, Any]", join: Join) -> NoReturn:
    """Be one of the other processes: take the same steps, and nobody hears of them. Ends with the first one."""
    batches: Queue[list[Sequence]] = Queue()
    Thread(target=receive, args=(connection, batches), daemon=True, name="reader").start()
    try:
        scorer = prepare(join.start, join, tell=lambda _step: None).scorer
        seconds_per_token(scorer)
    except ModelRefusedError:
        signal.pause()  # until the first one, which refuses it too, has said so and ends
    while True:
        scorer.score(batches.get())


def receive(connection: "Connection[Any, Any]", batches: "Queue[list[Sequence]]") -> NoReturn:
    """Batches until the first process ends; then this one does, whatever it waits for."""
    try:
        while True:
            batches.put(connection.recv())
    finally:
        os._exit(0)


def seconds_per_token(scorer: Scorer) -> float:
    """What a token of a costly batch takes, once kernels are warm."""
    batch = costly_batch(scorer, min(PROBE_TOKENS, scorer.budget.tokens))
    started = time.perf_counter()
    scorer.score(batch)
    return (time.perf_counter() - started) / sum(sequence.num_tokens for sequence in batch)


def serve(connection: "Connection[Any, Any]", scorer: Scorer, meter: Meter, group: Group) -> None:
    """Take, run, give back. The next batch is read, and the last answer written, while one runs."""
    batches: Queue[list[Sequence] | None] = Queue(1)
    Thread(target=read, args=(connection, batches, group), daemon=True, name="reader").start()
    with ThreadPoolExecutor(1, "writer") as writer:
        while (batch := batches.get()) is not None:
            outcomes = tuple(outcomes_of(scorer, batch))
            scored = Scored(outcomes, meter.used(), meter.peak(), scorer.budget.halvings)
            writer.submit(connection.send, scored).add_done_callback(end_if_lost)


def outcomes_of(scorer: Scorer, batch: list[Sequence]) -> list[Outcome]:
    """One outcome a sequence, also where the model's code fails on one of them: that one alone is answered with it.

    What leaves the device unusable ends the process, which is then replaced; so does any failure where others
    compute with this one, since they would wait for it.
    """
    try:
        return scorer.score(batch)
    except Exception as error:
        if is_sticky(error) or scorer.ranks.size > 1:
            raise
        if len(batch) == 1:
            print_exception(error)
            return [Failure("internal", f"the model's code failed on this sequence: {type(error).__name__}")]
    middle = len(batch) // 2
    return outcomes_of(scorer, batch[:middle]) + outcomes_of(scorer, batch[middle:])


def is_sticky(error: Exception) -> bool:
    """Whether it is a fault of the device: after one, every call on a CUDA context fails."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def read(connection: "Connection[Any, Any]", batches: "Queue[list[Sequence] | None]", group: Group) -> None:
    """Batches until the other end is closed, or a message cannot be read, then None."""
    try:
        with suppress(EOFError, OSError):
            while True:
                message = connection.recv_bytes()
                group.pass_on(message)
                batches.put(pickle.loads(message))
    finally:
        batches.put(None)


def end_if_lost(written: "Future[None]") -> None:
    """An answer that could not be sent would be waited for in vain: end, and be replaced."""
    if written.exception() is not None:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
