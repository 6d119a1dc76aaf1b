"""A sequence of the model's whole context in windows, against one forward pass of the model's own code.

    .venv/bin/python tests/bench longest [--tokens 8192] [--window 1024]

The reference is the stock forward over the whole sequence at once, in the same float32; the differences of all its
logprobs, largest and mean, in nats.
"""

import argparse

import numpy as np
import torch

from bench.measuring import seconds_of
from bench.models import our_scorer, stock_model
from bench.report import report
from bench.stock import backbone, selective_rows
from logprobd.sequences import Options, Scores, Sequence
from logprobd.settings import ModelSettings


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)


def run(options: argparse.Namespace) -> None:
    settings = ModelSettings(devices="cpu")
    scorer, model = our_scorer(settings), stock_model(settings)
    scorer.budget.allow(options.window)
    ids = np.random.default_rng(0).integers(0, 49152, options.tokens).astype(np.int32)
    sequence = Sequence(ids[:1], ids[1:], Options())
    scored: list[object] = []
    seconds = seconds_of(lambda: scored.extend(scorer.score([sequence])), scorer.device)
    (outcome,) = scored
    assert isinstance(outcome, Scores), outcome
    with torch.inference_mode():
        row = torch.from_numpy(ids[:-1].astype(np.int64))[None]
        own = selective_rows(model, backbone(model)(input_ids=row, use_cache=False)[0][0], sequence.completion)
    difference = np.abs(outcome.logprobs - own)
    row_of = {"tokens": options.tokens, "window": options.window, "tokens/s": round(options.tokens / seconds, 1)}
    report(
        "longest",
        [row_of | {"max difference": float(difference.max()), "mean difference": float(difference.mean())}],
        options.out,
    )
