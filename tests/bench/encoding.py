"""What a call costs between the caller's ids and the arrays, beside the model: the binary form against JSON.

    .venv/bin/python tests/bench encoding

1,000 prompts of 100 ids, each with a completion of 1,000: a million scored tokens, in requests of the client's own
size, one after the other. What answers is in the same process, computes nothing, and its own reading and writing is
measured apart. The ids are numpy arrays, or lists of Python's integers, which take most of what binary costs to read.
"""

import argparse
import time
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from bench.measuring import median
from bench.report import Row, report
from echo import Echo
from logprobd_client import Client

NUM_COMPLETIONS, COMPLETION_TOKENS, PROMPT_TOKENS, VOCAB = 1000, 1000, 100, 49152

LOGPROBS = -np.random.default_rng(0).exponential(size=VOCAB).astype(np.float32)


def like_a_model(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Logprobs with as many digits as a model's: one for each id of the vocabulary."""
    return LOGPROBS[ids]


def calls() -> dict[str, tuple[Any, Any]]:
    """The same prompts and completions, by how the caller holds them."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, PROMPT_TOKENS).astype(np.int32) for _ in range(NUM_COMPLETIONS)]
    completions = [random.integers(0, VOCAB, COMPLETION_TOKENS).astype(np.int32) for _ in range(NUM_COMPLETIONS)]
    lists = [ids.tolist() for ids in prompts], [ids.tolist() for ids in completions]
    return {"arrays": (prompts, completions), "lists": lists}


def seconds_of_call(binary: bool, prompts: Any, completions: Any) -> tuple[float, float]:
    """Seconds of the client and of what answers it; one request after the other, so that they can be told apart."""
    echo = Echo(like_a_model, keeps_asked=False)
    with Client(transport=httpx.MockTransport(echo), binary=binary, max_in_flight=1) as client:
        started = time.perf_counter()
        result = client.score(prompts, completions)
        seconds = time.perf_counter() - started
    assert result.usage["completion_tokens"] == NUM_COMPLETIONS * COMPLETION_TOKENS
    return seconds - echo.seconds, echo.seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=7)


def run(options: argparse.Namespace) -> None:
    cases = [(ids, call, binary) for ids, call in calls().items() for binary in (False, True)]
    measured: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(options.repeats + 1):
        for ids, call, binary in cases:
            measured.setdefault((ids, binary), []).append(seconds_of_call(binary, *call))
    rows: list[Row] = []
    for (ids, binary), seconds in measured.items():
        client, service = (median([pair[side] for pair in seconds[1:]]) for side in (0, 1))  # the first warms up
        row: Row = {"ids": ids, "form": "binary" if binary else "JSON", "client ms": round(1000 * client, 1)}
        row["what answers ms"] = round(1000 * service, 1)
        if binary:
            row["client % of JSON"] = round(100 * row["client ms"] / rows[-1]["client ms"], 1)
        rows.append(row)
    report("encoding", rows, options.out)
