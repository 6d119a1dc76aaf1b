"""A worker process: owns torch and one device, loads the model, then takes batches and gives outcomes back.

Run as `python -m logprobd.engine.worker FD`, where FD is its end of a socket pair. It ends when the other
end is closed, so it never outlives the service.
"""

import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from logprobd.engine.model import ModelRefusedError, load
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


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first GPU, or the CPU where there is none."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelRefusedError(f"--devices {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def serve(connection: "Connection[Any, Any]", scorer: Scorer) -> None:
    """Take, run, give back."""
    while True:
        sequences = connection.recv()
        started = time.perf_counter()
        outcomes = scorer.score(sequences)
        connection.send(Scored(tuple(outcomes), time.perf_counter() - started))


if __name__ == "__main__":
    main(int(sys.argv[1]))
