"""Many clients at once: nobody starves, nobody's answer is another's, and who leaves takes his work along."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from running import Running, running_service


def body_of(number: int) -> dict[str, Any]:
    return {"prompt": [number % 200 + 1, 3], "completions": [[number % 199 + 1, number % 7 + 1], [5]]}


async def post(client: httpx.AsyncClient, body: object) -> Any:
    response = await client.post("/logprobs", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["groups"]


def test_two_hundred_concurrent_requests_get_their_own_answers(tiny_service: Running) -> None:
    async def run() -> tuple[list[Any], list[Any]]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=tiny_service.url, limits=limits) as client:
            together = await asyncio.gather(*(post(client, body_of(number)) for number in range(200)))
            return together, [await post(client, body_of(number)) for number in range(200)]

    together, alone = asyncio.run(run())

    assert together == alone


def queue_of(running: Running) -> dict[str, int]:
    queue: dict[str, int] = running.get("/info").json()["queue"]
    return queue


def test_abandoned_requests_leave_the_queue_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    async def abandon(url: str, blocker: Any) -> None:
        limits = httpx.Limits(max_connections=250)
        async with httpx.AsyncClient(base_url=url, limits=limits) as client:
            blocking = asyncio.create_task(client.post("/logprobs", json=blocker, timeout=120))
            await asyncio.sleep(0.5)
            tasks = [asyncio.create_task(post(client, body_of(number))) for number in range(200)]
            await asyncio.sleep(1.5)
            for task in [blocking, *tasks]:
                task.cancel()
            await asyncio.gather(blocking, *tasks, return_exceptions=True)

    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--max-batch-tokens", "512") as running:
        blocker = {"groups": [{"prompt": [n % 200 + 1], "completions": [[2] * 500] * 3} for n in range(400)]}
        asyncio.run(abandon(running.url, blocker))
        deadline = time.monotonic() + 5
        while (queue := queue_of(running))["tokens"] and time.monotonic() < deadline:
            time.sleep(0.05)
        started = time.perf_counter()
        running.post(body_of(1))
        seconds = time.perf_counter() - started

        assert queue == {"requests": 0, "sequences": 0, "tokens": 0}
        assert seconds < 5  # the blocker alone would have taken a minute
        assert running.get("/metrics").text.count('status="499"') >= 1


def test_a_small_request_passes_a_huge_one(tiny_folder: Path, tmp_path: Path) -> None:
    async def run(url: str) -> tuple[float, float, int]:
        huge = {"groups": [{"prompt": [n % 200 + 1, n // 200 + 1], "completions": [[5]]} for n in range(20_000)]}
        async with httpx.AsyncClient(base_url=url) as client:
            started = time.perf_counter()
            big = asyncio.create_task(post(client, huge))
            while not (await client.get("/info")).json()["queue"]["sequences"]:
                await asyncio.sleep(0.01)
            small_started = time.perf_counter()
            await post(client, body_of(3))
            small = time.perf_counter() - small_started
            groups = await big
            return small, time.perf_counter() - started, len(groups)

    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--max-batch-tokens", "256") as running:
        small, big, groups = asyncio.run(run(running.url))

    assert groups == 20_000
    assert small < big / 3


def test_a_body_that_comes_too_slowly_is_answered_504(tiny_folder: Path, tmp_path: Path) -> None:
    def slow() -> Any:
        yield b'{"prompt": [1], '
        time.sleep(3)
        yield b'"completions": [[2]]}'

    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--request-timeout", "1") as running:
        started = time.monotonic()
        headers = {"Content-Type": "application/json"}
        response = httpx.post(running.url + "/logprobs", content=slow(), headers=headers, timeout=20)

        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        assert time.monotonic() - started < 10


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_unread(tiny_folder: Path, tmp_path: Path, chunked: bool) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--max-body-bytes", "100000") as running:
        content: Any = b"[" + b" " * 200_000
        response = httpx.post(
            running.url + "/logprobs",
            content=iter([content]) if chunked else content,
            headers={"Content-Type": "application/json"},
            timeout=20,
        )

        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert "100000" in response.json()["error"]["message"]
        assert "retry-after" not in response.headers


def test_too_many_sequences_are_refused_with_the_limit(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--max-request-sequences", "10") as running:
        refused = running.post({"prompt": [1], "completions": [[2]] * 11})

        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "request_too_large"
        assert running.post({"prompt": [1], "completions": [[2]] * 10}).status_code == 200
