"""A worker process: owns torch and one device, loads the model, then takes batches and gives outcomes back.

Run as `python -m logprobd.engine.worker FD`, where FD is its end of a socket pair. It ends when the other
end is closed, so it never outlives the service.
"""

import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from logprobd.engine.model import ModelRefusedError, find_device, load, weight_bytes
from logprobd.engine.scorer import HEAD_CHUNK_BYTES, Scorer
from logprobd.engine.selftest import choose_scorer
from logprobd.messages import Loading, Ready, Refused, Scored, Start


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to handle: it drains first
    connection: Connection[Any, Any] = Connection(fd)
    try:
        start = connection.recv()
        scorer = prepare(connection, start)
        if scorer is not None:
            serve(connection, scorer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the service is gone


def prepare(connection: "Connection[Any, Any]", start: Start) -> Scorer | None:
    """Load and test the model, telling the service about each step; None if it is refused."""
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    try:
        device = find_device(start.device)
        connection.send(Loading("loading the weights"))
        loaded = load(start.settings, device, tell=lambda step: connection.send(Loading(step)))
        connection.send(Loading("comparing with the model's own forward"))
        scorer, selftest = choose_scorer(loaded)
    except ModelRefusedError as error:
        connection.send(Refused(str(error)))
        return None
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    memory = {"weights": weight_bytes(loaded.model), "head_chunk": HEAD_CHUNK_BYTES}
    connection.send(Ready(loaded.info, loaded.tokenizer, selftest, str(device), memory, versions))
    return scorer


def serve(connection: "Connection[Any, Any]", scorer: Scorer) -> None:
    """Take, run, give back."""
    while True:
        connection.send(Scored(tuple(scorer.score(connection.recv()))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
