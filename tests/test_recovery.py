"""Workers that are killed, stuck, fail or do not start, with requests in flight: each is answered once, and right."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from faulty_llama import HANGS, KILLS, RAISES, RUNS_OUT, STICKS, save_faulty_llama
from oracle import tiny_llama
from running import Running, running_service

SOUND = [{"prompt": [number + 1, 2, 3], "completions": [[4, 5, number + 1], [6]]} for number in range(40)]


class Faulty:
    """A service of a model that fails on certain ids while it is armed, and what it answers while it is not."""

    def __init__(self, running: Running, armed_by: Path) -> None:
        self.running = running
        self.armed_by = armed_by
        self.right = [self.score(body) for body in SOUND]

    def arm(self) -> None:
        self.armed_by.touch()

    def score(self, body: Any) -> Any:
        response = self.running.post(body, timeout=90)
        return response.json()["groups"] if response.status_code == 200 else response.json()["error"]["code"]

    def score_all(self, bodies: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.score, bodies))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    save_faulty_llama(folder / "model")
    flags = ["--model", str(folder / "model"), "--trust-remote-code", "--worker-deadline", "3"]
    with running_service(folder / "log", *flags, FAULTY_ARMED_BY=str(folder / "armed")) as running:
        yield Faulty(running, folder / "armed")


@pytest.fixture
def armed(service: Faulty) -> Iterator[Faulty]:
    service.arm()
    yield service
    service.armed_by.unlink(missing_ok=True)
    service.running.wait_for("/readyz")


def with_bad(tokens: list[int]) -> list[Any]:
    """Sound requests, and amid them one with two completions of which the second has the tokens."""
    return [*SOUND[:20], {"prompt": [9], "completions": [[8], [7, *tokens, *range(1, 60)]]}, *SOUND[20:]]


@pytest.mark.parametrize(("tokens", "code"), [(KILLS, "worker_crashed"), (RAISES, "internal")])
def test_only_the_sequence_that_fails_is_answered_with_it(armed: Faulty, tokens: list[int], code: str) -> None:
    answers = armed.score_all(with_bad(tokens))

    assert answers[20] == code
    assert [*answers[:20], *answers[21:]] == armed.right


def test_a_stuck_worker_is_replaced_and_what_it_held_is_answered(armed: Faulty) -> None:
    answers = armed.score_all([SOUND[0], {"prompt": [9], "completions": [[7, *HANGS, 7]]}, *SOUND[1:4]])

    assert answers[1] == "worker_crashed"
    assert [answers[0], *answers[2:]] == armed.right[:4]
    assert "worker is stuck" in armed.running.log


def test_a_fault_that_sticks_to_the_device_costs_the_worker_and_nothing_else(armed: Faulty) -> None:
    before = armed.running.worker_pids()
    answers = armed.score_all(with_bad(STICKS))

    assert isinstance(answers[20], list)  # the fault is gone with the worker
    assert [*answers[:20], *answers[21:]] == armed.right
    assert armed.running.worker_pids() != before


def test_out_of_memory_halves_the_pass_and_is_over(armed: Faulty) -> None:
    restarts = armed.running.get("/info").json()["workers"][0]["restarts"]
    answers = armed.score_all(with_bad(RUNS_OUT))
    worker = armed.running.get("/info").json()["workers"][0]

    assert isinstance(answers[20], list)
    assert [*answers[:20], *answers[21:]] == armed.right
    assert worker["restarts"] == restarts
    assert worker["out_of_memory_halvings"] >= 1


def test_a_worker_killed_over_and_over_under_load_loses_nothing(service: Faulty) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(service.score, SOUND[number % 40]) for number in range(400)]
        for _ in range(2):
            time.sleep(0.3)
            os.kill(service.running.wait_for("/info").json()["workers"][0]["pid"], signal.SIGKILL)
            service.running.wait_for("/readyz")

        assert [answer.result() for answer in answers] == [service.right[number % 40] for number in range(400)]


def test_of_two_workers_one_goes_on_while_the_other_is_down(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--devices", "cpu,cpu") as running:
        right = [running.post(body).json()["groups"] for body in SOUND[:5]]
        first, second = running.worker_pids()
        os.kill(first, signal.SIGKILL)
        running.wait_for("/readyz", status=503)
        while_down = [running.post(body).json()["groups"] for body in SOUND[:5]]
        still_down = running.get("/readyz").status_code == 503
        running.wait_for("/readyz")
        states = running.get("/info").json()["workers"]

    assert while_down == right
    assert still_down  # so those were answered by the other one
    assert states[1]["pid"] == second
    assert [worker["restarts"] for worker in states] == [1, 0]


def test_a_worker_that_dies_at_start_is_tried_again_ever_more_slowly(tmp_path: Path) -> None:
    save_faulty_llama(tmp_path / "model")
    (tmp_path / "model" / "faulty.py").write_text("import os; os._exit(7)")
    flags = ["--model", str(tmp_path / "model"), "--trust-remote-code"]
    with running_service(tmp_path / "log", *flags, ready=False) as running:
        running.wait_for("/healthz")
        deadline = time.monotonic() + 90
        while running.log.count("ended while starting") < 2 and time.monotonic() < deadline:
            time.sleep(0.2)

        assert "exit_code=7" in running.log
        assert "retry_in=2.0" in running.log
        assert running.get("/readyz").json()["error"]["code"] == "not_ready"
        assert running.get("/healthz").status_code == 200
        assert running.stop() == 0


def test_weights_that_change_on_disk_are_not_served_under_the_old_name(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    with running_service(tmp_path / "log", "--model", str(tmp_path / "model")) as running:
        tiny_llama(seed=1).save_pretrained(tmp_path / "model")
        os.kill(running.worker_pids()[0], signal.SIGKILL)

        assert running.process.wait(90) == 1
        assert "weights changed while it was served" in running.log


def test_requests_during_a_drain_are_refused_and_healthz_still_answers(tmp_path: Path) -> None:
    save_faulty_llama(tmp_path / "model")
    flags = ["--model", str(tmp_path / "model"), "--trust-remote-code", "--drain-timeout", "2"]
    with running_service(tmp_path / "log", *flags, FAULTY_ARMED_BY=str(tmp_path / "armed")) as running:
        (tmp_path / "armed").touch()
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": [1], "completions": [[*HANGS, 1]]}
            stuck = pool.submit(running.post, body)
            time.sleep(1)
            running.process.send_signal(signal.SIGTERM)
            refused = running.wait_for("/readyz", status=503)
            alive = running.get("/healthz").status_code
            code = running.process.wait(30)

            assert refused.json()["error"]["code"] == "draining"
            assert alive == 200
            assert code == 0  # what cannot be answered in time does not keep the service
            # What cannot be answered in time is told so: a client tries it elsewhere.
            assert stuck.result().status_code == 503
            assert stuck.result().json()["error"]["code"] == "draining"
