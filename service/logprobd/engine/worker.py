"""A worker process: owns torch and one device, loads the model, then takes batches and gives outcomes back.

Run as `python -m logprobd.engine.worker FD`, where FD is its end of a socket pair. It ends when the other
end is closed, so it never outlives the service.
"""

import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Queue
from threading import Thread
from traceback import print_exception
from typing import Any

import torch
import transformers

from logprobd.engine.memory import costly_batch, plan_memory
from logprobd.engine.meter import Meter, meter_of
from logprobd.engine.model import ModelRefusedError, find_device, load
from logprobd.engine.scorer import Scorer
from logprobd.engine.selftest import choose_scorer
from logprobd.messages import Loading, Ready, Refused, Scored, Start
from logprobd.sequences import Failure, Outcome, Sequence

PROBE_TOKENS = 256


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle: it drains first
    connection: Connection[Any, Any] = Connection(fd)
    try:
        start = connection.recv()
        prepared = prepare(connection, start)
        if prepared is not None:
            serve(connection, *prepared)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the service is gone


def prepare(connection: "Connection[Any, Any]", start: Start) -> tuple[Scorer, Meter] | None:
    """Load and test the model, telling the service about each step; None if it is refused."""
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    try:
        device = find_device(start.device)
        meter = meter_of(device)
        connection.send(Loading("loading the weights"))
        loaded = load(start.settings, device, tell=lambda step: connection.send(Loading(step)))
        connection.send(Loading("comparing with the model's own forward"))
        scorer, selftest = choose_scorer(loaded, alone=start.settings.batch_invariant)
        connection.send(Loading("measuring the memory of a pass"))
        on_device = start.settings.devices.split(",").count(start.device)
        plan = plan_memory(scorer, meter, start.settings.memory_bound, on_device)
    except ModelRefusedError as error:
        connection.send(Refused(str(error)))
        return None
    # A plain str: torch's own class would have whoever reads it import torch.
    versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    speed = seconds_per_token(scorer)
    connection.send(Ready(loaded.info, loaded.tokenizer, selftest, str(device), plan, speed, versions))
    return scorer, meter


def seconds_per_token(scorer: Scorer) -> float:
    """What a token of a costly batch takes, once kernels are warm."""
    batch = costly_batch(scorer, min(PROBE_TOKENS, scorer.budget.tokens))
    started = time.perf_counter()
    scorer.score(batch)
    return (time.perf_counter() - started) / sum(sequence.num_tokens for sequence in batch)


def serve(connection: "Connection[Any, Any]", scorer: Scorer, meter: Meter) -> None:
    """Take, run, give back. The next batch is read, and the last answer written, while one runs."""
    batches: Queue[list[Sequence] | None] = Queue(1)
    Thread(target=read, args=(connection, batches), daemon=True, name="reader").start()
    with ThreadPoolExecutor(1, "writer") as writer:
        while (batch := batches.get()) is not None:
            outcomes = tuple(outcomes_of(scorer, batch))
            scored = Scored(outcomes, meter.used(), meter.peak(), scorer.budget.halvings)
            writer.submit(connection.send, scored).add_done_callback(end_if_lost)


def outcomes_of(scorer: Scorer, batch: list[Sequence]) -> list[Outcome]:
    """One outcome a sequence, also where the model's code fails on one of them: that one alone is answered with it.

    What leaves the device unusable ends the process, which is then replaced.
    """
    try:
        return scorer.score(batch)
    except Exception as error:
        if is_sticky(error):
            raise
        if len(batch) == 1:
            print_exception(error)
            return [Failure("internal", f"the model's code failed on this sequence: {type(error).__name__}")]
    middle = len(batch) // 2
    return outcomes_of(scorer, batch[:middle]) + outcomes_of(scorer, batch[middle:])


def is_sticky(error: Exception) -> bool:
    """Whether it is a fault of the device: after one, every call on a CUDA context fails."""
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def read(connection: "Connection[Any, Any]", batches: "Queue[list[Sequence] | None]") -> None:
    """Batches until the other end is closed, or a message cannot be read, then None."""
    try:
        with suppress(EOFError, OSError):
            while True:
                batches.put(connection.recv())
    finally:
        batches.put(None)


def end_if_lost(written: "Future[None]") -> None:
    """An answer that could not be sent would be waited for in vain: end, and be replaced."""
    if written.exception() is not None:
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
