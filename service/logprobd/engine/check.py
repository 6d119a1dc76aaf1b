"""`logprobd check`: loads the model, runs the self-test and prints how the model would be served."""

import sys

import torch

from logprobd.engine.group import Group
from logprobd.engine.memory import mib
from logprobd.engine.model import ModelRefusedError
from logprobd.engine.preparing import prepare
from logprobd.messages import MemoryPlan, SelfTest, Start
from logprobd.settings import ModelSettings


def run_check(settings: ModelSettings) -> int:
    """Print the verdict; 0 if the model is served exactly, 1 if it is refused."""
    try:
        start = Start(settings, settings.devices.split(",")[0], None)
        prepared = prepare(start, Group(start).form, tell=lambda step: print(f"{step} ...", file=sys.stderr))
    except ModelRefusedError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    info = prepared.scorer.loaded.info
    lines = {
        "model": f"{info.id} ({info.family}), fingerprint {info.fingerprint}",
        "precision": f"{info.precision}, head {info.head_precision}",
        "device": f"{prepared.device}, torch {torch.__version__}",
        "vocabulary": f"{info.vocab_size} tokens",
        "context": f"{info.max_positions} tokens",
        **selftest_lines(prepared.selftest),
        **plan_lines(prepared.plan),
    }
    for name, value in lines.items():
        print(f"{name:<16}{value}")
    for line in prepared.selftest.layers:
        print(f"{'layers':<16}{line}")
    return 0


def selftest_lines(selftest: SelfTest) -> dict[str, str]:
    return {
        "layout": f"{selftest.layout} ({selftest.reason})",
        "logprob error": f"max {selftest.max_error:.2g}, mean {selftest.mean_error:.2g} nats "
        "against the model's own forward",
        "entropy error": f"max {selftest.max_entropy_error:.2g} nats",
        "same bits": "alone and in company" if selftest.batch_invariant else "not always: see --batch-invariant",
    }


def plan_lines(plan: MemoryPlan) -> dict[str, str]:
    passes = f"{mib(plan.fixed)} (logits {mib(plan.head_chunk)} at a time) and {plan.per_token / 2**10:.0f} KiB a token"
    return {
        "memory limit": f"{mib(plan.limit)}, of which {mib(plan.idle)} between batches (weights {mib(plan.weights)})",
        "a pass": f"{passes}; up to {plan.max_pass_tokens} tokens",
        "longest": f"{plan.longest_sequence} tokens; {plan.per_cached_token / 2**10:.1f} KiB each for keys in windows",
    }
