"""GRPO-shaped workloads: scored completion tokens a second by every method, beside the least work, in one run.

    .venv/bin/python tests/bench trainer [--shapes short,long-prompt] [--repeats 3] [--scale 0.3] [--no-memory]

`least work` is the stock backbone over the distinct tokens, and the head for the distinct scored rows (see stock.py).
The methods take turns, HTTP too, after one sequence each to warm up: what disturbs the machine disturbs all alike.
Memory is the peak beyond the loaded model, each method in a process of its own. On CUDA a 1.6B model of random weights
runs in bfloat16.
"""

import argparse
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.measuring import in_own_process, median, peak_of, take_turns
from bench.models import our_scorer, settings_for, stock_model
from bench.report import Row, report
from bench.stock import METHODS, Method, one_by_one
from bench.trl_fused import TRL_FUSED, is_installed, trl_fused
from bench.workloads import SHAPES, groups_of, scored_tokens, sequences_of
from logprobd.engine.model import find_device
from logprobd.engine.scorer import Scorer
from logprobd.sequences import Scores, Sequence
from logprobd.settings import ModelSettings
from running import Running, running_service

CLIENTS = 16
OURS, HTTP, LEAST = "ours, in-process", f"ours, HTTP, {CLIENTS} clients", "least work"


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
    with ExitStack() as stack:
        methods = works(stack, settings, stock, ours)
        for name in chosen:
            methods[name](sequences[:1])  # what is set up on first use
        turns: dict[str, Callable[[], object]] = {name: partial(methods[name], sequences) for name in chosen}
        seconds = take_turns(turns, options.repeats, ours.device)
    errors = errors_of(chosen, ours, stock, sequences)
    return {
        name: row_of(shape, name, sequences, taken, seconds.get(LEAST)) | errors.get(name, {})
        for name, taken in seconds.items()
    }


def works(
    stack: ExitStack, settings: ModelSettings, stock: PreTrainedModel, ours: Scorer
) -> dict[str, Callable[[list[Sequence]], object]]:
    """What each method does with sequences; the service is started when it is first asked."""

    @cache
    def service() -> tuple[Running, ThreadPoolExecutor]:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = [] if settings.model is None else ["--model", settings.model]
        flags = ["--precision", settings.precision, "--devices", settings.devices]
        running = stack.enter_context(running_service(folder / "log", *model, *flags))
        return running, stack.enter_context(ThreadPoolExecutor(CLIENTS))

    return {
        **{name: partial(method, stock) for name, method in stock_methods().items()},
        OURS: partial(score_in_batches, ours),
        HTTP: lambda sequences: everybody(*service(), sequences),
    }


def score_in_batches(scorer: Scorer, sequences: list[Sequence]) -> list[object]:
    """Whole groups, about as many tokens at a time as a pass may have, like the service's queue."""
    outcomes: list[object] = []
    batch: list[Sequence] = []
    for group in groups_of(sequences):
        if batch and sum(s.num_tokens for s in batch + group) > scorer.budget.tokens:
            outcomes += scorer.score(batch)
            batch = []
        batch += group
    return outcomes + scorer.score(batch)


def everybody(running: Running, pool: ThreadPoolExecutor, sequences: list[Sequence]) -> None:
    """All groups from many clients, each sending one group at a time."""

    def post(group: list[Sequence]) -> None:
        running.post(on_wire(group), timeout=600).raise_for_status()

    list(pool.map(post, groups_of(sequences)))


def on_wire(group: list[Sequence]) -> dict[str, object]:
    return {"prompt": group[0].prompt.tolist(), "completions": [sequence.completion.tolist() for sequence in group]}


def errors_of(chosen: list[str], ours: Scorer, stock: PreTrainedModel, sequences: list[Sequence]) -> dict[str, Row]:
    """The largest difference from one by one, of every method that has right numbers, on the first group."""
    group = groups_of(sequences)[0]
    truth = np.concatenate(one_by_one(stock, group))
    got = {name: method(stock, group) for name, method in stock_methods().items() if name in chosen and name != LEAST}
    if OURS in chosen:
        got[OURS] = [outcome.logprobs for outcome in ours.score(group) if isinstance(outcome, Scores)]
    return {name: {"max difference": float(np.abs(np.concatenate(own) - truth).max())} for name, own in got.items()}


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
