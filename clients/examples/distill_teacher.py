"""On-policy distillation in plain torch: a student learns from a teacher that a running service holds.

    logprobd serve                                                  # the teacher
    python clients/examples/distill_teacher.py STUDENT [--teacher http://127.0.0.1:8000] [--steps 3]

STUDENT is a folder with a causal model whose ids are the teacher's. Each step the student samples, and the teacher says
what it thinks of each sampled token. What a token's log student - log teacher is above the mean of all pushes its
probability down: a policy gradient whose reward is the negative reverse KL, token by token.
"""

import argparse
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from logprobd_client import Client

PROMPT_TOKENS, COMPLETION_TOKENS, SAMPLES = 4, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("student")
    parser.add_argument("--teacher", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_pretrained(options.student, dtype=torch.float32)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    with Client(options.teacher) as teacher:
        if teacher.info()["model"]["vocab_size"] != student.config.vocab_size:
            raise SystemExit("the teacher's vocabulary is another one than the student's")
        for step in range(options.steps):
            print(f"step {step + 1}: reverse KL {distill(student, teacher, optimizer):.4f} nats a token")


def distill(student: Any, teacher: Client, optimizer: torch.optim.Optimizer) -> float:
    """One step; returns the mean reverse KL of the sampled tokens before it."""
    prompts = torch.randint(1, student.config.vocab_size, (SAMPLES, PROMPT_TOKENS))
    ids = sample(student, prompts)
    completions = ids[:, PROMPT_TOKENS:]
    theirs = teacher.score(prompts.tolist(), completions.tolist()).logprobs
    logits = student(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
    own = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    reverse_kl = own.detach() - torch.from_numpy(np.stack(theirs))
    optimizer.zero_grad()
    ((reverse_kl - reverse_kl.mean()) * own).mean().backward()
    optimizer.step()
    return float(reverse_kl.mean())


@torch.no_grad()
def sample(student: Any, ids: torch.Tensor) -> torch.Tensor:
    """The prompts, each with a completion sampled token by token."""
    for _ in range(COMPLETION_TOKENS):
        probabilities = student(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    return ids


if __name__ == "__main__":
    main()
