"""GRPO-shaped workloads: scored completion tokens a second by every method, beside the least work, in one run.

    .venv/bin/python tests/bench trainer [--shapes short,long-prompt] [--repeats 3] [--scale 0.3] [--no-memory]

`least work` is the stock backbone over the distinct tokens, and the head for the distinct scored rows (see stock.py).
The methods take turns, HTTP too, after one sequence each to warm up: what disturbs the machine disturbs all alike.
Memory is the peak beyond the loaded model, each method in a process of its own; over HTTP the worker's. On CUDA a 1.6B
model of random weights runs in bfloat16. With trl installed, its own fused head takes a turn too (see trl_fused.py).
"""

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.measuring import in_own_process, median, peak_of, take_turns
from bench.models import our_scorer, settings_for, stock_model
from bench.report import Row, report
from bench.serving import Service, serving
from bench.stock import METHODS, Method, Scored, one_by_one
from bench.trl_fused import TRL_FUSED, is_installed, trl_fused
from bench.workloads import SHAPES, groups_of, scored_tokens, sequences_of
from logprobd.engine.model import find_device
from logprobd.engine.scorer import Scorer
from logprobd.sequences import Outcome, Scores, Sequence
from logprobd.settings import ModelSettings

CLIENTS = 16
OURS, HTTP, LEAST = "ours, in-process", f"ours, HTTP, {CLIENTS} clients", "least work"
ONE_BY_ONE = "one by one"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--methods", default=";".join(names()), help=f"separated by ; of {'; '.join(names())}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--precision", help="float32 on a CPU and bfloat16 on CUDA without it")
    parser.add_argument("--device", default="auto")


def names() -> list[str]:
    return [*stock_methods(), OURS, HTTP]


def stock_methods() -> dict[str, Method]:
    """With TRL's own code where it is installed."""
    return METHODS | ({TRL_FUSED: trl_fused} if is_installed() else {})


def run(options: argparse.Namespace) -> None:
    chosen = [name.strip() for name in options.methods.split(";")]
    if unknown := set(chosen) - set(names()):
        raise SystemExit(f"no such method: {'; '.join(sorted(unknown))}")
    device = find_device(options.device)
    settings = settings_for(options.model, options.precision, device)
    rows: list[Row] = []
    for shape in options.shapes.split(","):
        measured = measure(settings, chosen, shape, options)
        for name in () if options.no_memory else measured:
            if name != HTTP:
                measured[name]["peak MiB"] = in_own_process(peak_mib, settings, name, shape, options.scale)
        rows += measured.values()
    absent = "" if is_installed() else " TRL is not installed: its own fused head is left out, its tiles stand for it."
    note = "Scored completion tokens a second, medians; time / least by the same round."
    report("trainer", rows, options.out, note + absent)


@torch.inference_mode()
def measure(settings: ModelSettings, chosen: list[str], shape: str, options: argparse.Namespace) -> dict[str, Row]:
    """A row for each method, all of which take turns; the models are gone afterwards."""
    stock, ours = stock_model(settings), our_scorer(settings)
    sequences = sequences_of(shape, ours.loaded.info.vocab_size, options.scale)
    scored: dict[str, Scored] = {}
    with ExitStack() as stack:
        service = cache(lambda: stack.enter_context(serving(settings, CLIENTS)))
        methods = works(stock, ours, service)
        for name in chosen:
            methods[name](sequences[:1])  # what is set up on first use
        turns: dict[str, Callable[[], object]] = {
            name: partial(keep, scored, name, methods[name], sequences) for name in chosen
        }
        seconds = take_turns(turns, options.repeats, ours.device)
        memory = {HTTP: {"peak MiB": service().peak_mib()}} if HTTP in chosen else {}
    errors = errors_of(scored, scored.get(ONE_BY_ONE) or one_by_one(stock, groups_of(sequences)[0]))
    return {
        name: row_of(shape, name, sequences, taken, seconds.get(LEAST)) | errors.get(name, {}) | memory.get(name, {})
        for name, taken in seconds.items()
    }


def works(
    stock: PreTrainedModel, ours: Scorer, service: Callable[[], Service]
) -> dict[str, Callable[[list[Sequence]], Scored]]:
    """What each method does with sequences; the service is started when it is first asked."""
    return {
        **{name: partial(method, stock) for name, method in stock_methods().items()},
        OURS: lambda sequences: logprobs_of(score_in_batches(ours, sequences)),
        HTTP: lambda sequences: service().score(sequences),
    }


def keep(
    scored: dict[str, Scored], name: str, method: Callable[[list[Sequence]], Scored], sequences: list[Sequence]
) -> None:
    scored[name] = method(sequences)


def logprobs_of(outcomes: list[Outcome]) -> Scored:
    scores = [outcome for outcome in outcomes if isinstance(outcome, Scores)]
    assert len(scores) == len(outcomes), [outcome for outcome in outcomes if not isinstance(outcome, Scores)]
    return [outcome.logprobs for outcome in scores]


def score_in_batches(scorer: Scorer, sequences: list[Sequence]) -> list[Outcome]:
    """Whole groups, about as many tokens at a time as a pass may have, like the service's queue."""
    outcomes: list[Outcome] = []
    batch: list[Sequence] = []
    for group in groups_of(sequences):
        if batch and sum(s.num_tokens for s in batch + group) > scorer.budget.tokens:
            outcomes += scorer.score(batch)
            batch = []
        batch += group
    return outcomes + scorer.score(batch)


def errors_of(scored: dict[str, Scored], truth: Scored) -> dict[str, Row]:
    """The largest difference from one by one, of every method that has right numbers.

    Where one by one takes no turns, the truth is the first group's only, and so is the difference.
    """
    own = {name: np.concatenate(scores[: len(truth)]) for name, scores in scored.items() if name != LEAST}
    return {
        name: {"max difference": float(np.abs(logprobs - np.concatenate(truth)).max())}
        for name, logprobs in own.items()
    }


def row_of(shape: str, name: str, sequences: list[Sequence], seconds: list[float], least: list[float] | None) -> Row:
    row: Row = {"shape": shape, "method": name, "tokens/s": round(scored_tokens(sequences) / median(seconds), 1)}
    if least is not None:
        row["time / least"] = round(median([one / other for one, other in zip(seconds, least, strict=True)]), 3)
    return row


def peak_mib(settings: ModelSettings, name: str, shape: str, scale: float) -> int:
    """The peak of one method, in a process that does nothing else."""
    with torch.inference_mode():
        if name == OURS:
            scorer = our_scorer(settings)
            sequences = sequences_of(shape, scorer.loaded.info.vocab_size, scale)
            return peak_of(lambda: score_in_batches(scorer, sequences), scorer.device) >> 20
        model = stock_model(settings)
        sequences = sequences_of(shape, model.config.vocab_size, scale)
        method = stock_methods()[name]
        method(model, sequences[:1])
        return peak_of(lambda: method(model, sequences), model.device) >> 20
