"""How long the HTTP process is deaf while it reads, answers or refuses the largest bodies: the slowest of /healthz.

    .venv/bin/python tests/bench event_loop

A tiny model is served; one client asks /healthz every 10 ms, another sends a large body. Without the other, the same
client has its own slowest answer, which is the machine's.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors.numpy

from bench.report import Row, report
from oracle import tiny_llama
from running import Running, running_service

BODY_BYTES = 50_000_000
JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3)


def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tiny_llama().save_pretrained(Path(folder) / "model")
        flags = ["--model", f"{folder}/model", "--max-queued-tokens", "20000000"]
        with running_service(Path(folder) / "log", *flags) as running:
            rows = [row_of(running, name, kind, body, options.repeats) for name, (kind, body) in bodies().items()]
    report("event_loop", rows, options.out, "Milliseconds of the slowest /healthz meanwhile, of all repeats.")


def bodies() -> dict[str, tuple[str, bytes]]:
    """Bodies by what is large about them."""
    long_ids = json.dumps([index % 200 + 1 for index in range(400)])
    group = f'{{"prompt":[1,2],"completions":[{long_ids}]}}'
    many = json.dumps(
        {"groups": [{"prompt": [n % 200 + 1, n // 200 % 200 + 1], "completions": [[3]]} for n in range(100_000)]}
    )
    one_prompt = json.dumps({"prompt": [1, 2], "completions": [[n % 200 + 1] for n in range(100_000)]})
    count = BODY_BYTES // 4 // 401
    flat = {
        "prompt_ids": np.ones(count, dtype=np.int32),
        "prompt_lengths": np.ones(count, dtype=np.int32),
        "completions_per_prompt": np.ones(count, dtype=np.int32),
        "completion_ids": np.full(count * 400, 3, dtype=np.int32),
        "completion_lengths": np.full(count, 400, dtype=np.int32),
    }
    return {
        "nothing": (JSON, b""),
        "50 MB of ids, refused at the end": (
            JSON,
            f'{{"groups":[{",".join([group] * (BODY_BYTES // len(group)))}],"x":1}}'.encode(),
        ),
        "50 MB that are not JSON": (JSON, b"[" + b"1," * (BODY_BYTES // 2)),
        "50 MB of nesting": (JSON, b"[" * BODY_BYTES),
        "800,000 ids, answered": (JSON, groups(group, 2_000)),
        "100,000 prompts": (JSON, many.encode()),
        "100,000 completions of a prompt": (JSON, one_prompt.encode()),
        "50 MB in safetensors, answered": (SAFETENSORS, safetensors.numpy.save(flat)),
    }


def groups(group: str, count: int, rest: str = "") -> bytes:
    return f'{{"groups":[{",".join([group] * count)}]{rest}}}'.encode()


def row_of(running: Running, name: str, kind: str, body: bytes, repeats: int) -> Row:
    slowest, seconds, status = 0.0, 0.0, 0
    for _ in range(repeats):
        started = time.perf_counter()
        status, worst = while_asking(running, lambda: send(running, kind, body))
        slowest, seconds = max(slowest, worst), time.perf_counter() - started
    return {
        "body": name,
        "answered": status or None,
        "seconds": round(seconds, 2),
        "slowest /healthz, ms": round(slowest * 1000),
    }


def send(running: Running, kind: str, body: bytes) -> int:
    if not body:
        time.sleep(3)
        return 0
    headers = {"Content-Type": kind, "Accept": kind}
    return httpx.post(running.url + "/logprobs", content=body, headers=headers, timeout=600).status_code


def while_asking(running: Running, work: Callable[[], int]) -> tuple[int, float]:
    """What work gives, and the slowest answer of /healthz while it runs."""
    done, worst = threading.Event(), [0.0]

    def ask() -> None:
        with httpx.Client(base_url=running.url) as client:
            client.get("/healthz")
            while not done.is_set():
                started = time.perf_counter()
                client.get("/healthz", timeout=60)
                worst[0] = max(worst[0], time.perf_counter() - started)
                time.sleep(0.01)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        result: Any = work()
    finally:
        done.set()
        asking.join()
    return int(result), worst[0]
