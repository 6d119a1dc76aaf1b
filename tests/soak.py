"""A service under mixed traffic and faults, every answer compared with the known right one.

    .venv/bin/python tests/soak.py --seconds 600 [--clients 64]

64 clients send JSON and binary requests; a tenth hang up, a twentieth send broken bodies; the worker is killed every 20
seconds, and at random runs out of memory. Prints JSON: what was sent and answered, what was wrong or lost (nothing
may be), the service's memory over time, and how long a killed worker kept its requests. Exit status 1 if anything was
wrong.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "service"), str(HERE.parent / "clients")]

import httpx  # noqa: E402 - the rest is found through the path above
import numpy as np  # noqa: E402
import psutil  # noqa: E402

from faulty_llama import RUNS_OUT, save_faulty_llama  # noqa: E402
from logprobd_client import AsyncClient  # noqa: E402
from logprobd_client.errors import LogprobdError  # noqa: E402
from running import Running, running_service  # noqa: E402

HANG_UP, BROKEN = 0.10, 0.05
BROKEN_BODIES = (
    b"{",
    b"[]",
    b'{"prompt": [1], "completions": [[999999]]}',
    b'{"prompt": [], "completions": []}',
    b"\xff" * 99,
)
KILL_EVERY_SECONDS, GROW_MIB = 20, 128

Asked = tuple[list[int], list[list[int]], float]


@dataclass
class Tally:
    """What happened."""

    sent: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    kills: int = 0
    recovery_seconds: list[float] = field(default_factory=list)
    memory_mib: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Traffic:
    """Where it goes, what is sent, and the right answers."""

    url: str
    requests: list[Asked]
    right: list[list[list[float]]]
    tally: Tally


def made_up(count: int) -> list[Asked]:
    """Requests of all sizes, some of which make the model run out of memory."""
    chosen = random.Random(0)
    requests: list[Asked] = []
    for _ in range(count):
        prompt = [chosen.randrange(1, 100) for _ in range(chosen.choice([1, 5, 20, 100]))]
        lengths = [chosen.choice([0, 1, 8, 60]) for _ in range(chosen.choice([1, 2, 8]))]
        completions = [[chosen.randrange(1, 100) for _ in range(length)] for length in lengths]
        if chosen.random() < 0.02:
            completions[0] = [*RUNS_OUT, *completions[0]]
        requests.append((prompt, completions, chosen.choice([0.7, 1.0])))
    return requests


async def score(client: AsyncClient, asked: Asked) -> list[list[float]]:
    prompt, completions, temperature = asked
    result = await client.score([prompt], [completions], temperature=temperature)
    return [logprobs.tolist() for logprobs in result.logprobs[0]]


async def one_request(client: AsyncClient, traffic: Traffic) -> None:
    """One request of some kind, and whether its answer is right."""
    dice, place, tally = random.random(), random.randrange(len(traffic.requests)), traffic.tally
    if dice < HANG_UP:
        tally.sent["hung up"] += 1
        asked = asyncio.create_task(score(client, traffic.requests[place]))
        await asyncio.sleep(random.random() * 0.1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    elif dice < HANG_UP + BROKEN:
        tally.sent["broken"] += 1
        await send_broken(traffic.url, tally)
    else:
        tally.sent["whole"] += 1
        try:
            answer = await score(client, traffic.requests[place])
        except LogprobdError as error:
            tally.wrong.append(f"request {place}: {error}")
            return
        if any(not np.allclose(one, other, atol=1e-5) for one, other in zip(answer, traffic.right[place], strict=True)):
            tally.wrong.append(f"request {place}: other numbers")


async def send_broken(url: str, tally: Tally) -> None:
    headers = {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        try:
            response = await http.post("/logprobs", content=random.choice(BROKEN_BODIES), headers=headers)
        except httpx.TransportError as error:
            tally.wrong.append(f"a broken body: {error!r}")
            return
    if response.status_code not in (400, 413, 422):
        tally.wrong.append(f"a broken body was answered {response.status_code}: {response.text[:200]}")


async def keep_asking(traffic: Traffic, number: int, until: float) -> None:
    async with AsyncClient(traffic.url, binary=number % 2 == 0, retry_for=120) as client:
        while time.monotonic() < until:
            await one_request(client, traffic)


async def keep_killing(running: Running, until: float, tally: Tally) -> None:
    """Kill the worker now and then, and see how long it takes until something is answered again."""
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:
        while time.monotonic() + KILL_EVERY_SECONDS / 2 < until:
            await asyncio.sleep(min(KILL_EVERY_SECONDS, max(1.0, (until - time.monotonic()) / 3)))
            (worker,) = (await http.get("/info")).json()["workers"]
            if worker["state"] != "ready":
                continue
            os.kill(worker["pid"], signal.SIGKILL)
            tally.kills += 1
            started = time.monotonic()
            response = await http.post("/logprobs", json={"prompt": [1], "completions": [[2]]})
            tally.recovery_seconds.append(round(time.monotonic() - started, 2))
            if response.status_code != 200:
                tally.wrong.append(f"after a kill: {response.status_code} {response.text[:200]}")


async def watch_memory(running: Running, until: float, tally: Tally) -> None:
    """Of the HTTP process; the worker's is bounded by its plan, and gone with each kill."""
    process = psutil.Process(running.process.pid)
    while time.monotonic() < until:
        tally.memory_mib.append(process.memory_info().rss >> 20)
        await asyncio.sleep(1)


async def soak(running: Running, seconds: float, clients: int) -> dict[str, Any]:
    requests, tally = made_up(200), Tally()
    async with AsyncClient(running.url) as client:
        right = [await score(client, asked) for asked in requests]
    traffic = Traffic(running.url, requests, right, tally)
    (running.log_file.parent / "armed").touch()
    until = time.monotonic() + seconds
    asking = [keep_asking(traffic, number, until) for number in range(clients)]
    await asyncio.gather(keep_killing(running, until, tally), watch_memory(running, until, tally), *asking)
    return await summary(running, tally, seconds, clients)


async def summary(running: Running, tally: Tally, seconds: float, clients: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        queue = (await http.get("/info")).json()["queue"]
        metrics = (await http.get("/metrics")).text
    quarter = max(1, len(tally.memory_mib) // 4)
    early, late = tally.memory_mib[quarter : 2 * quarter] or tally.memory_mib, tally.memory_mib[-quarter:]
    statuses: Counter[str] = Counter()
    for line in metrics.splitlines():
        if line.startswith('logprobd_requests_total{route="/logprobs"'):
            statuses[line.split('status="')[1][:3]] += int(float(line.rpartition(" ")[2]))
    if sum(queue.values()):
        tally.wrong.append(f"left in the queue: {queue}")
    if max(late) > max(early) + GROW_MIB:
        tally.wrong.append(f"the HTTP process grew from {max(early)} to {max(late)} MiB")
    return {
        "seconds": seconds,
        "clients": clients,
        "sent": dict(tally.sent),
        "answered by status": dict(statuses),
        "wrong or lost": len(tally.wrong),
        "first wrong": tally.wrong[:5],
        "kills": tally.kills,
        "first answer after a kill, seconds": sorted(tally.recovery_seconds),
        "memory of the HTTP process, MiB": {"second quarter": max(early), "last quarter": max(late)},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_faulty_llama(folder / "model")
        flags = ["--model", str(folder / "model"), "--trust-remote-code", "--max-batch-tokens", "2048"]
        with running_service(folder / "log", *flags, FAULTY_ARMED_BY=str(folder / "armed")) as running:
            result = asyncio.run(soak(running, options.seconds, options.clients))
    print(json.dumps(result, indent=1))
    return 1 if result["wrong or lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
