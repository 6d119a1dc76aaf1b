"""A trainer whose process has the client and numpy only: a table of bigrams is pulled to what the service holds.

    python tests/scripted_trainer.py URL

Prints the KL in nats a token, a line a step. Nothing heavy can be imported here, not even by what is imported.
"""

import sys
from typing import Any

import numpy as np

HEAVY = {"torch", "transformers", "tokenizers", "trl", "accelerate", "fastapi", "pydantic", "logprobd"}


class Refusing:
    """An importer that stands before all others."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in HEAVY:
            raise ImportError(f"a trainer's process has no {name}")


sys.meta_path.insert(0, Refusing())

from logprobd_client import Client  # noqa: E402

Array = np.ndarray[Any, Any]

STEPS, ROWS, PROMPTS, TEMPERATURE, RATE = 20, 2048, 8, 2.0, 300.0


def main(url: str) -> None:
    random = np.random.default_rng(0)
    with Client(url) as reference:
        logits = np.zeros((PROMPTS, reference.info()["model"]["vocab_size"]))
        for _ in range(STEPS):
            prompts = random.integers(PROMPTS, size=ROWS)
            completions = (logits[prompts] + random.gumbel(size=(ROWS, logits.shape[1]))).argmax(axis=1)
            scored = reference.score(list(prompts[:, None]), list(completions[:, None]), temperature=TEMPERATURE)
            print(step(logits, prompts, completions, np.concatenate(scored.logprobs)))


def step(logits: Array, prompts: Array, completions: Array, reference: Array) -> float:
    """A step of policy gradient in place, rewarded by nothing but nearness; the mean KL before it."""
    rows = logits[prompts] - np.logaddexp.reduce(logits[prompts], axis=1, keepdims=True)
    chosen = np.arange(ROWS), completions
    divergence = rows[chosen] - reference
    gradient = -np.exp(rows)
    gradient[chosen] += 1
    gradient *= (divergence.mean() - divergence)[:, None]
    np.add.at(logits, prompts, RATE * gradient / ROWS)
    return float(divergence.mean())


if __name__ == "__main__":
    main(sys.argv[1])
