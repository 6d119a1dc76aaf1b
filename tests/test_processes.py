"""Processes: at once alive, later ready; a worker that dies is replaced and its work is done; a drain loses nothing."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from running import running_service

PROMPT = list(range(1, 60))


def body_of(number: int) -> dict[str, Any]:
    return {"prompt": [number % 200, *PROMPT], "completions": [[number % 200, number // 7 % 200, 3]]}


def logprobs(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    answer: list[float] = response.json()["groups"][0]["completions"][0]["logprobs"]
    return answer


def test_the_service_lives_at_once_and_is_ready_when_the_worker_is(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), ready=False) as running:
        running.wait_for("/healthz")
        early = [running.get(path) for path in ("/readyz", "/health", "/info")] + [running.post(body_of(1))]

        assert [response.status_code for response in early] == [503] * 4
        assert {response.json()["error"]["code"] for response in early} == {"not_ready"}
        assert all(response.headers["retry-after"] for response in early)

        running.wait_for("/readyz")

        assert running.get("/health").status_code == 200
        assert "loading the weights" in running.log
        assert "worker ready" in running.log


def test_a_killed_worker_is_replaced_and_nobody_notices_but_by_the_delay(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder)) as running:
        expected = [logprobs(running.post(body_of(number))) for number in range(40)]
        stop = threading.Event()

        def kill_once_busy() -> None:
            time.sleep(0.1)
            os.kill(running.worker_pids()[0], signal.SIGKILL)
            stop.set()

        with ThreadPoolExecutor(9) as pool:
            killer = pool.submit(kill_once_busy)
            answers = []
            while not stop.is_set():
                answers = list(pool.map(lambda number: logprobs(running.post(body_of(number))), range(40)))
            killer.result()
        after = [logprobs(running.post(body_of(number))) for number in range(40)]
        running.wait_for("/readyz")

        for got in (*answers, *after):
            assert got
        assert answers == [pytest.approx(numbers, abs=1e-5) for numbers in expected]
        assert after == [pytest.approx(numbers, abs=1e-5) for numbers in expected]
        assert "worker ended" in running.log
        assert '"signal": 9' in running.log or "signal=9" in running.log


def test_an_idle_workers_death_shows_in_readyz_until_it_is_back(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder)) as running:
        before = running.worker_pids()
        os.kill(before[0], signal.SIGKILL)
        running.wait_for("/readyz", status=503)

        assert running.get("/healthz").status_code == 200

        running.wait_for("/readyz")

        assert running.worker_pids() != before


def test_two_workers_share_the_queue(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(tiny_folder), "--devices", "cpu,cpu", "--max-batch-tokens", "64")
    with running_service(tmp_path / "log", *arguments) as running:
        pids = running.worker_pids()
        expected = [logprobs(running.post(body_of(number))) for number in range(30)]
        os.kill(pids[0], signal.SIGKILL)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: logprobs(running.post(body_of(number))), range(30)))

        assert len(set(pids)) == 2
        assert answers == [pytest.approx(numbers, abs=1e-5) for numbers in expected]


def test_a_drain_answers_what_was_accepted_and_refuses_the_rest(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(tiny_folder), "--max-batch-tokens", "256")
    with running_service(tmp_path / "log", *arguments) as running, ThreadPoolExecutor(4) as pool:
        many = {"groups": [body_of(number) for number in range(3000)]}
        accepted = [pool.submit(running.post, many) for _ in range(3)]
        while running.get("/info").json()["queue"]["requests"] < 3:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        late = running.wait_for("/readyz", status=503)
        refused = running.post(body_of(1))
        answers = [future.result() for future in accepted]

        assert late.json()["error"]["code"] == "draining"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        assert [response.status_code for response in answers] == [200] * 3
        assert running.process.wait(30) == 0


def test_a_request_over_its_time_is_answered_504(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(tiny_folder), "--request-timeout", "0.05", "--max-batch-tokens", "64")
    with running_service(tmp_path / "log", *arguments) as running:
        response = running.post({"groups": [body_of(number) for number in range(3000)]})

        assert response.status_code == 504
        assert response.json()["error"]["code"] == "timeout"
        assert "0.05 seconds" in response.json()["error"]["message"]


def test_limits_refuse_with_the_number(tiny_folder: Path, tmp_path: Path) -> None:
    limits = ("--max-body-bytes", "2000", "--max-queued-tokens", "100", "--max-sequence-tokens", "80")
    with running_service(tmp_path / "log", "--model", str(tiny_folder), *limits) as running:
        large = running.post({"prompt": [1] * 2000, "completions": [[2]]})
        streamed = httpx.post(
            running.url + "/logprobs",
            content=iter([b" " * 1500, b" " * 1500]),
            headers={"Content-Type": "application/json"},
        )
        many = running.post({"groups": [body_of(1), body_of(2)]})
        long = running.post({"prompt": [1] * 80, "completions": [[2]]})

        for response, code, limit in (
            (large, "body_too_large", "2000"),
            (streamed, "body_too_large", "2000"),
            (many, "request_too_large", "100"),
            (long, "sequence_too_long", "80"),
        ):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == code
            assert limit in response.json()["error"]["message"]
            assert "retry-after" not in response.headers


def test_a_key_opens_everything_but_liveness(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), LOGPROBD_API_KEY="old,new") as running:
        closed = ["/info", "/docs", "/openapi.json", "/nothing", "/HEALTHZ", "/healthz/", "//healthz", "/%68ealthz/x"]
        refused = [running.get(path) for path in closed] + [running.post(body_of(1))]
        wrong = httpx.get(running.url + "/info", headers={"Authorization": "Bearer older"})
        right = [httpx.get(running.url + "/info", headers={"Authorization": f"bearer {key}"}) for key in ("old", "new")]

        assert {response.status_code for response in (*refused, wrong)} == {401}
        assert {response.json()["error"]["code"] for response in refused} == {"unauthorized"}
        assert [response.status_code for response in right] == [200, 200]
        assert [running.get(path).status_code for path in ("/healthz", "/readyz", "/health")] == [200] * 3
        assert "older" not in running.log


def test_an_abandoned_request_is_logged_as_499_and_leaves_the_queue(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(tiny_folder), "--max-batch-tokens", "64")
    with running_service(tmp_path / "log", *arguments) as running:
        with pytest.raises(httpx.ReadTimeout):
            running.post({"groups": [body_of(number) for number in range(5000)]}, timeout=0.7)
        started = time.monotonic()
        logprobs(running.post(body_of(1)))
        seconds = time.monotonic() - started

        assert "status=499" in running.log
        assert running.get("/info").json()["queue"] == {"requests": 0, "sequences": 0, "tokens": 0}
        assert seconds < 5


def test_a_model_that_cannot_be_served_ends_the_service_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with running_service(tmp_path / "log", "--model", str(tmp_path), ready=False) as running:
        assert running.process.wait(60) == 1
        assert "pickled weights" in running.log
        assert "Traceback" not in running.log


def test_a_limit_beyond_the_model_refuses_to_start(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", str(tiny_folder), "--max-sequence-tokens", "100000")
    with running_service(tmp_path / "log", *arguments, ready=False) as running:
        assert running.process.wait(60) == 1
        assert "--max-sequence-tokens 100000" in running.log


def test_json_logs_are_one_object_a_line_and_never_show_contents(tiny_folder: Path, tmp_path: Path) -> None:
    import json

    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--log-format", "json") as running:
        running.post({"prompt": [201, 202, 203], "completions": [[204, 205]]})
        assert running.stop() == 0
        lines = [json.loads(line) for line in running.log.splitlines()]
        request = next(line for line in lines if line["event"] == "request" and line["path"] == "/logprobs")

        assert request["status"] == 200
        assert request["sequences"] == 1
        assert request["tokens"] == 5
        assert request["request_id"]
        assert "203, 204" not in running.log


def test_a_queue_that_fills_batches_loses_nothing_with_its_worker(tiny_folder: Path, tmp_path: Path) -> None:
    """With a second batch on its way behind the one that runs, when the worker is killed."""
    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--max-batch-tokens", "64") as running:
        bodies = [{"prompt": [number, 1, 2], "completions": [[3] * 30] * 2} for number in range(120)]
        alone = running.post(bodies[7]).json()["groups"]
        with ThreadPoolExecutor(40) as pool:
            replies = pool.map(running.post, bodies)
            time.sleep(0.2)
            os.kill(running.worker_pids()[0], signal.SIGKILL)
            answered = list(replies)

    assert [reply.status_code for reply in answered] == [200] * 120
    assert answered[7].json()["groups"] == alone
