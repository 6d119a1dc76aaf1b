"""TRL's trainers with a remote reference in two processes, and with a service that is restarted in the run."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import trl_runs
from running import ROOT, Running, environment, free_port, running_service

# A trainer is a cycle of objects, which closes its client's connections whenever Python happens to collect it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def two_ranks(folder: Path, url: str, output: Path, **variables: str) -> list[tuple[int, str]]:
    """The exit status and the output of each of two processes that train together over gloo."""
    script = [sys.executable, str(ROOT / "tests" / "trl_runs.py"), str(folder), url, str(output)]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in ("0", "1"):
        own = environment(**shared, **variables, RANK=rank, LOCAL_RANK=rank)
        log = (output / f"log{rank}").open("wb")
        ranks.append((subprocess.Popen(script, env=own, stdout=log, stderr=log), log))
    ended = []
    for number, (process, log) in enumerate(ranks):
        code = process.wait(300)
        log.close()
        ended.append((code, (output / f"log{number}").read_text()))
    return ended


def test_two_processes_have_the_same_losses(policy_folder: Path, policy_service: Running, tmp_path: Path) -> None:
    ended = two_ranks(policy_folder, policy_service.url, tmp_path)

    assert [code for code, _ in ended] == [0, 0], ended
    for rank in (0, 1):
        runs = json.loads((tmp_path / f"rank{rank}.json").read_text())
        remote, stock = trl_runs.Run(**runs["remote"]), trl_runs.Run(**runs["stock"])
        trl_runs.assert_same(remote, stock)
        assert (remote.num_models, stock.num_models) == (1, 2)


def test_one_rank_that_fails_ends_both_with_its_reason(
    policy_folder: Path, policy_service: Running, tmp_path: Path
) -> None:
    ended = two_ranks(policy_folder, policy_service.url, tmp_path, BROKEN_RANK="1")

    for code, text in ended:
        assert code != 0
        assert "the remote reference failed, on 1 of 2 ranks; rank 1: " in text


class AfterFirstStep(TrainerCallback):
    """Does something once, between two steps."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.work()


def test_a_service_that_is_restarted_in_the_run_changes_nothing(policy_folder: Path, tmp_path: Path) -> None:
    """The old one is killed before the next step asks, and the new one is loading when it does."""
    port, flags = free_port(), ["--model", str(policy_folder), "--precision", "float32"]
    stop = threading.Event()

    def second_life() -> None:
        with running_service(tmp_path / "second", *flags, port=port):
            stop.wait(300)

    second = threading.Thread(target=second_life)
    stock = trl_runs.run(lambda: trl_runs.grpo(policy_folder, tmp_path))
    with running_service(tmp_path / "first", *flags, port=port) as first:

        def restart() -> None:
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            second.start()

        try:
            remote = trl_runs.run(
                lambda: trl_runs.grpo(policy_folder, tmp_path, first.url, callbacks=[AfterFirstStep(restart)])
            )
        finally:
            stop.set()
            second.join()

    trl_runs.assert_same(remote, stock)
    assert "worker ready" in (tmp_path / "second").read_text()


@pytest.mark.parametrize("ld_alpha", [None, 0.5])
def test_dpo_has_the_same_losses_by_the_services_sums(
    policy_folder: Path, policy_service: Running, tmp_path: Path, ld_alpha: float | None
) -> None:
    changes = {} if ld_alpha is None else {"ld_alpha": ld_alpha}
    stock = trl_runs.run(lambda: trl_runs.dpo(policy_folder, tmp_path / "stock", changes=changes))
    remote = trl_runs.run(lambda: trl_runs.dpo(policy_folder, tmp_path / "remote", policy_service.url, changes))

    assert len(stock.steps) == len(remote.steps) == 3
    np.testing.assert_allclose(remote.logged("loss"), stock.logged("loss"), rtol=0, atol=1e-5)
    np.testing.assert_allclose(remote.logged("rewards/margins"), stock.logged("rewards/margins"), rtol=0, atol=1e-4)
    assert remote.num_models == 1


def test_dpos_cached_sums_belong_to_the_service_that_gave_them(
    policy_folder: Path, policy_service: Running, tmp_path: Path
) -> None:
    trainer = trl_runs.dpo(policy_folder, tmp_path, policy_service.url)
    model = policy_service.get("/info").json()["model"]

    assert model["fingerprint"] in trainer._cache_key()
    assert model["precision"] in trainer._cache_key()
