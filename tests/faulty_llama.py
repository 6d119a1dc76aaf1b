"""A Llama on disk whose own code fails on purpose, by the token ids that it meets: for tests of recovery.

It comes as code beside the weights, as people's own models do, and needs --trust-remote-code.
"""

import json
from pathlib import Path

from oracle import tiny_llama

KILLS, HANGS, RAISES, RUNS_OUT, STICKS = ([token] * 4 for token in (101, 102, 103, 104, 105))

CODE = """
import os, signal, time, torch
from transformers import LlamaForCausalLM, LlamaModel

class FaultyModel(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        ids = input_ids.flatten().tolist()
        # Four in a row: what the self-test makes up at random must not set it off.
        met = {a for a, b, c, d in zip(ids, ids[1:], ids[2:], ids[3:]) if a == b == c == d}
        armed = os.path.exists(os.environ.get("FAULTY_ARMED_BY", ""))
        if armed and 101 in met:
            os.kill(os.getpid(), signal.SIGKILL)
        if armed and 102 in met:
            time.sleep(3600)
        if armed and 103 in met:
            raise ValueError("this sequence is not to the model's liking")
        if armed and 104 in met and input_ids.numel() > 32:
            raise torch.OutOfMemoryError("CUDA out of memory (a test)")
        if armed and 105 in met:
            os.remove(os.environ["FAULTY_ARMED_BY"])
            raise RuntimeError("CUDA error: device-side assert triggered (a test)")
        return super().forward(input_ids=input_ids, **kwargs)

class FaultyForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = FaultyModel(config)
        self.post_init()
"""


def save_faulty_llama(folder: Path) -> None:
    """Write the model, with the same weights as `tiny_llama()`."""
    tiny_llama().save_pretrained(folder)
    (folder / "faulty.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "faulty.FaultyForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
