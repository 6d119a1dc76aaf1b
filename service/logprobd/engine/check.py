"""`logprobd check`: loads the model, runs the self-test and prints how the model would be served."""

import sys

import torch

from logprobd.engine.model import ModelRefusedError, find_device, load, weight_bytes
from logprobd.engine.scorer import HEAD_CHUNK_BYTES
from logprobd.engine.selftest import choose_scorer
from logprobd.messages import SelfTest
from logprobd.settings import ModelSettings


def run_check(settings: ModelSettings) -> int:
    """Print the verdict; 0 if the model is served exactly, 1 if it is refused."""
    try:
        device = find_device(settings.devices.split(",")[0])
        loaded = load(settings, device, tell=lambda step: print(f"{step} ...", file=sys.stderr))
        _, selftest = choose_scorer(loaded)
    except ModelRefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    info = loaded.info
    lines = {
        "model": f"{info.id} ({info.family}), fingerprint {info.fingerprint}",
        "precision": f"{info.precision}, head {info.head_precision}",
        "device": f"{device}, torch {torch.__version__}",
        "vocabulary": f"{info.vocab_size} tokens",
        "context": f"{info.max_positions} tokens",
        "weights": f"{weight_bytes(loaded.model) / 2**20:.0f} MiB",
        "head chunk": f"{HEAD_CHUNK_BYTES / 2**20:.0f} MiB of logits at a time",
        **selftest_lines(selftest),
    }
    for name, value in lines.items():
        print(f"{name:<16}{value}")
    for line in selftest.layers:
        print(f"{'layers':<16}{line}")
    return 0


def selftest_lines(selftest: SelfTest) -> dict[str, str]:
    return {
        "layout": f"{selftest.layout} ({selftest.reason})",
        "logprob error": f"max {selftest.max_error:.2g}, mean {selftest.mean_error:.2g} nats "
        "against the model's own forward",
        "entropy error": f"max {selftest.max_entropy_error:.2g} nats",
    }
