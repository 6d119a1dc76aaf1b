"""The largest errors of a running service (the embedded model) against the model's own float32 forward.

    .venv/bin/logprobd serve &
    .venv/bin/python tests/bench exactness --url http://127.0.0.1:8000

One line a prompt length: groups of up to 16 completions, real prose and random ids, three temperatures.
"""

import argparse
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.report import report

GRID = [(1, 16, 12), (2, 8, 30), (17, 16, 24), (130, 12, 40), (520, 8, 64), (900, 4, 90), (1300, 3, 70), (2000, 2, 50)]
TEMPERATURES = (0.5, 1.0, 2.0)


@torch.inference_mode()
def own_rows(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0]
    rows: torch.Tensor = logits[len(prompt) - 1 : -1].double()
    return rows


def errors(url: str, model: Any, prompt: list[int], completions: list[list[int]]) -> dict[str, Any]:
    """Largest and mean errors of logprobs and entropies, by temperature."""
    body = {"prompt": prompt, "completions": completions, "entropy": True}
    figures: dict[str, Any] = {"prompt": len(prompt), "completions": len(completions)}
    own = [own_rows(model, prompt, completion) for completion in completions]
    for temperature in TEMPERATURES:
        reply = httpx.post(f"{url}/logprobs", json={**body, "temperature": temperature}, timeout=600).json()
        logprobs, entropies = [], []
        for rows, completion, got in zip(own, completions, reply["groups"][0]["completions"], strict=True):
            expected = (rows / temperature).log_softmax(-1)
            chosen = expected.numpy()[np.arange(len(completion)), completion]
            logprobs.append(np.abs(chosen - got["logprobs"]))
            entropies.append(np.abs(torch.special.entr(expected.exp()).sum(-1).numpy() - got["entropy"]))
        figures[f"T={temperature}"] = {
            "logprob_max": float(f"{np.concatenate(logprobs).max():.1e}"),
            "logprob_mean": float(f"{np.concatenate(logprobs).mean():.1e}"),
            "entropy_max": float(f"{np.concatenate(entropies).max():.1e}"),
        }
    return figures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000")


def run(options: argparse.Namespace) -> None:
    folder = httpx.get(f"{options.url}/info").json()["model"]["path"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prose = AutoTokenizer.from_pretrained(folder)((Path(__file__).parents[2] / "LICENSE").read_text())["input_ids"]
    random = np.random.default_rng(0)
    rows = []
    for num_prompt, num_completions, length in GRID:
        completions = [prose[num_prompt : num_prompt + length]]
        while len(completions) < num_completions:
            completions.append(random.integers(0, 49152, random.integers(1, length + 1)).tolist())
        rows.append(errors(options.url, model, prose[:num_prompt], completions))
    report("exactness", rows, options.out)
