"""How long packing takes beside the forward pass of the same sequences, on the embedded model.

    .venv/bin/python tests/bench packing

512 sequences of 1,024 tokens, in groups of 8 that share their prompt and with nothing shared. The forward is
measured on a part of them, whose tokens are counted, since all of it takes minutes on a CPU.
"""

import argparse
import time

import numpy as np
import torch

from bench.measuring import median
from bench.report import Row, report
from logprobd.engine.model import load
from logprobd.engine.packing import cut, find_nodes, pack
from logprobd.engine.scorer import Scorer
from logprobd.sequences import IntArray, Options, Sequence
from logprobd.settings import ModelSettings

NUM_SEQUENCES, LENGTH, GROUP, PROMPT = 512, 1024, 8, 768
FORWARD_SEQUENCES = 8


def sequences(group: int) -> list[IntArray]:
    """Random ids; each `group` of them starts with the same prompt."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 49152, PROMPT).astype(np.int32) for _ in range(NUM_SEQUENCES // group)]
    return [
        np.concatenate([prompt, random.integers(0, 49152, LENGTH - PROMPT).astype(np.int32)])
        for prompt in prompts
        for _ in range(group)
    ]


def seconds_to_pack(ids: list[IntArray]) -> float:
    def once() -> float:
        started = time.perf_counter()
        tree = pack(ids)
        find_nodes(cut(tree, tree.num_tokens)[0])
        return time.perf_counter() - started

    return median([once() for _ in range(5)])


def seconds_a_token(scorer: Scorer, ids: list[IntArray]) -> float:
    part = [Sequence(one[:PROMPT], one[PROMPT:], Options()) for one in ids[:FORWARD_SEQUENCES]]
    scorer.score(part[:1])
    started = time.perf_counter()
    tokens = sum(getattr(outcome, "computed_tokens", 0) for outcome in scorer.score(part))
    return (time.perf_counter() - started) / tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(options: argparse.Namespace) -> None:
    scorer = Scorer(load(ModelSettings(), torch.device("cpu")), "shared")
    rows: list[Row] = []
    for group in (GROUP, 1):
        ids = sequences(group)
        packing = seconds_to_pack(ids)
        forward = seconds_a_token(scorer, ids) * pack(ids).num_tokens
        rows.append({"group": group, "packing seconds": round(packing, 4), "forward seconds": round(forward, 1)})
        rows[-1]["packing % of forward"] = round(100 * packing / forward, 3)
    report("packing", rows, options.out)
