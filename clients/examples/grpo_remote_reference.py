"""GRPO with the reference model in a running service: a few tiny steps on a CPU.

    logprobd serve --model FOLDER                                   # the reference
    python clients/examples/grpo_remote_reference.py FOLDER [--reference http://127.0.0.1:8000] [--steps 3]

FOLDER is a model with a tokenizer, the policy's beginning. The trainer's process holds one model only.
"""

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from logprobd_client.trl import RemoteReferenceGRPOTrainer

PROMPTS = ["The capital of France is", "Once upon a time", "Two plus two is", "The sea is"] * 4


def reward_of_variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Completions that repeat themselves less are worth more."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--reference", default="http://127.0.0.1:8000")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output,
            beta=0.04,
            temperature=0.9,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=16,
            max_steps=options.steps,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        )
        trainer = RemoteReferenceGRPOTrainer(
            options.model,
            reward_of_variety,
            config,
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            reference=options.reference,
        )
        trainer.train()
        for step in trainer.state.log_history:
            if "kl" in step:
                print(f"step {step['step']}: loss {step['loss']:.6f}, kl {step['kl']:.6f}, reward {step['reward']:.3f}")


if __name__ == "__main__":
    main()
