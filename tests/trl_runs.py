"""Runs of TRL's trainers, with their own local reference and with a remote one, from the same seed.

As a script, started once a rank, it makes such a pair of runs under DDP and writes OUTPUT/rank….json:

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=… python tests/trl_runs.py FOLDER URL OUTPUT
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from logprobd_client.trl import (
    RemoteReferenceDPOTrainer,
    RemoteReferenceGRPOTrainer,
    RemoteReferenceRLOOTrainer,
)
from oracle import POLICY_WORDS

COMMON: dict[str, Any] = {
    "bf16": False,
    "learning_rate": 0.3,
    "logging_steps": 1,
    "max_steps": 3,
    "optim": "sgd",  # Adam's first steps go by a gradient's sign, also where it is nothing but rounding
    "per_device_train_batch_size": 4,
    "report_to": "none",
    "save_strategy": "no",
    "seed": 7,
    "use_cpu": True,
}
ONLINE: dict[str, Any] = {
    **COMMON,
    "beta": 0.1,
    "disable_dropout": True,
    "max_completion_length": 8,
    "num_generations": 4,
    "temperature": 0.7,
}


def prompts(count: int = 16) -> Dataset:
    """Prompts of two to five words, so that batches are padded."""
    texts = [" ".join(f"w{(7 * row + place) % POLICY_WORDS}" for place in range(2 + row % 4)) for row in range(count)]
    return Dataset.from_dict({"prompt": texts})


def preferences(count: int = 8) -> Dataset:
    rows = prompts(count)["prompt"]
    return Dataset.from_dict(
        {
            "prompt": [f"{prompt} " for prompt in rows],
            "chosen": [" ".join(f"w{(row + place) % POLICY_WORDS}" for place in range(3)) for row in range(count)],
            "rejected": [
                " ".join(f"w{(5 * row + place) % POLICY_WORDS}" for place in range(2 + row % 5)) for row in range(count)
            ],
        }
    )


def reward_of_even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


@dataclass(frozen=True, slots=True)
class Run:
    """What a run logged, a dict a step, and how many models it had when it ended."""

    steps: list[dict[str, float]]
    num_models: int

    def logged(self, name: str) -> list[float]:
        return [step[name] for step in self.steps]


def run(build: Callable[[], Any], resume: str | None = None) -> Run:
    """Build a trainer and train."""
    before = num_models()
    trainer = build()
    trainer.train(resume_from_checkpoint=resume)
    return Run([step for step in trainer.state.log_history if "loss" in step], num_models() - before)


def assert_same(remote: Run, stock: Run) -> None:
    """Two runs are one within rounding, and moved their policy."""
    assert len(remote.steps) == len(stock.steps)
    assert max(stock.logged("kl")) > 1e-3, "a policy that stays where it was proves nothing"
    np.testing.assert_allclose(remote.logged("loss"), stock.logged("loss"), rtol=0, atol=1e-5)
    np.testing.assert_allclose(remote.logged("kl"), stock.logged("kl"), rtol=0, atol=1e-4)


def num_models() -> int:
    """The Llamas that this process holds."""
    gc.collect()
    return sum(type(found) is LlamaForCausalLM for found in gc.get_objects())


def grpo(folder: Path, output: Path, reference: Any = None, changes: dict[str, Any] | None = None, **named: Any) -> Any:
    """GRPOTrainer, with its own reference unless one is given."""
    arguments: dict[str, Any] = {
        "args": GRPOConfig(str(output), **ONLINE | (changes or {})),
        "model": str(folder),
        "reward_funcs": reward_of_even_ids,
        "train_dataset": prompts(),
    } | named
    if reference is None:
        return GRPOTrainer(**arguments)
    return RemoteReferenceGRPOTrainer(**arguments, reference=reference)


def rloo(folder: Path, output: Path, reference: Any = None) -> Any:
    arguments: dict[str, Any] = {
        "args": RLOOConfig(str(output), **ONLINE),
        "model": str(folder),
        "reward_funcs": reward_of_even_ids,
        "train_dataset": prompts(),
    }
    return (
        RLOOTrainer(**arguments) if reference is None else RemoteReferenceRLOOTrainer(**arguments, reference=reference)
    )


def dpo(folder: Path, output: Path, reference: Any = None, changes: dict[str, Any] | None = None) -> Any:
    arguments: dict[str, Any] = {
        "args": DPOConfig(str(output), precompute_ref_log_probs=True, **COMMON | (changes or {})),
        "model": str(folder),
        "train_dataset": preferences(),
    }
    if reference is None:
        return DPOTrainer(**arguments)
    return RemoteReferenceDPOTrainer(**arguments, reference=reference)


def main(folder: str, url: str, output: str) -> None:
    """A pair of GRPO runs on this rank; with BROKEN_RANK set, that one's service is not there."""
    torch.set_num_threads(1)
    if broken := os.environ.get("BROKEN_RANK"):
        there = "http://127.0.0.1:1" if broken == os.environ["RANK"] else url
        run(lambda: grpo(Path(folder), Path(output), there, reference_timeout=5))
    runs = {
        "stock": run(lambda: grpo(Path(folder), Path(output))),
        "remote": run(lambda: grpo(Path(folder), Path(output), url)),
    }
    rank = int(os.environ["RANK"])
    Path(output, f"rank{rank}.json").write_text(json.dumps({name: asdict(made) for name, made in runs.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
