"""TRL's own trainers beside ours with a running service: the same losses, and one model less."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import trl_runs
from running import Running, running_service


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_runs.save_tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("reference") / "log"
    with running_service(log, "--model", str(folder), "--precision", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def stock_grpo(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> trl_runs.Run:
    """TRL's own run, which the remote ones are held to."""
    return trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path_factory.mktemp("stock")))


def assert_same(remote: trl_runs.Run, stock: trl_runs.Run) -> None:
    assert len(remote.steps) == len(stock.steps)
    assert max(stock.logged("kl")) > 1e-3, "a policy that stays where it was proves nothing"
    np.testing.assert_allclose(remote.logged("loss"), stock.logged("loss"), rtol=0, atol=1e-5)
    np.testing.assert_allclose(remote.logged("kl"), stock.logged("kl"), rtol=0, atol=1e-4)


def test_grpo_has_the_same_losses_with_one_model_less(
    folder: Path, service: Running, stock_grpo: trl_runs.Run, tmp_path: Path
) -> None:
    remote = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, service.url))

    assert_same(remote, stock_grpo)
    assert (remote.num_models, stock_grpo.num_models) == (1, 2)
