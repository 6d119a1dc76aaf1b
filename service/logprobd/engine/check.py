"""`logprobd check`: loads the model, runs the self-test and prints how the model would be served."""

import sys

import torch

from logprobd.engine.memory import mib, plan_memory
from logprobd.engine.meter import meter_of
from logprobd.engine.model import ModelRefusedError, find_device, load
from logprobd.engine.selftest import choose_scorer
from logprobd.messages import MemoryPlan, SelfTest
from logprobd.settings import ModelSettings


def run_check(settings: ModelSettings) -> int:
    """Print the verdict; 0 if the model is served exactly, 1 if it is refused."""
    try:
        device = find_device(settings.devices.split(",")[0])
        meter = meter_of(device)
        loaded = load(settings, device, tell=lambda step: print(f"{step} ...", file=sys.stderr))
        scorer, selftest = choose_scorer(loaded, alone=settings.batch_invariant)
        plan = plan_memory(scorer, meter, settings.memory_bound)
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
        **selftest_lines(selftest),
        **plan_lines(plan),
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
        "same bits": "alone and in company" if selftest.batch_invariant else "not always: see --batch-invariant",
    }


def plan_lines(plan: MemoryPlan) -> dict[str, str]:
    passes = f"{mib(plan.fixed)} (logits {mib(plan.head_chunk)} at a time) and {plan.per_token / 2**10:.0f} KiB a token"
    return {
        "memory limit": f"{mib(plan.limit)}, of which {mib(plan.idle)} between batches (weights {mib(plan.weights)})",
        "a pass": f"{passes}; up to {plan.max_pass_tokens} tokens",
        "longest": f"{plan.longest_sequence} tokens; {plan.per_cached_token / 2**10:.1f} KiB each for keys in windows",
    }
