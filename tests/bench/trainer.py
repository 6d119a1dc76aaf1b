"""GRPO-shaped workloads: scored completion tokens a second by every method, beside the least work, in one run.

    .venv/bin/python tests/bench trainer [--shapes short,long-prompt] [--repeats 3] [--scale 0.3] [--no-memory]

`least work` is one stock forward of the distinct tokens, and the head for the scored rows only (see stock.py).
The methods take turns, so that what disturbs the machine disturbs all alike. Memory is the peak beyond the loaded
model, each method in a process of its own. On CUDA a 1.6B model of random weights runs in bfloat16.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import httpx
import numpy as np
import torch

from bench.measuring import in_own_process, median, peak_of, take_turns
from bench.models import our_scorer, settings_for, stock_model
from bench.report import Row, report
from bench.stock import METHODS, Scored, one_by_one
from bench.workloads import SHAPES, scored_tokens, sequences_of
from logprobd.engine.model import find_device
from logprobd.engine.scorer import Scorer
from logprobd.sequences import Scores, Sequence
from logprobd.settings import ModelSettings
from running import Running, running_service

CLIENTS = 16
OURS, HTTP, LEAST = "ours, in-process", f"ours, HTTP, {CLIENTS} clients", "least work"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--methods", default=",".join([*(name.replace(",", ";") for name in METHODS), "ours", "http"]))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--device", default="auto")


def run(options: argparse.Namespace) -> None:
    device = find_device(options.device)
    settings = settings_for(options.model, options.precision, device)
    chosen = [name for name in METHODS if name.replace(",", ";") in options.methods.split(",")]
    stock, ours = stock_model(settings), our_scorer(settings)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for shape in options.shapes.split(","):
            sequences = sequences_of(shape, ours.loaded.info.vocab_size, options.scale)
            works: dict[str, Callable[[], object]] = {name: bound(METHODS[name], stock, sequences) for name in chosen}
            if "ours" in options.methods:
                works[OURS] = lambda batch=sequences: score_in_batches(ours, batch)  # type: ignore[misc]
            seconds = take_turns(works, options.repeats, device)
            if "http" in options.methods:
                seconds[HTTP] = over_http(Path(folder), settings, sequences, options.repeats)
            errors = errors_of(ours, stock, sequences)
            for name, taken in seconds.items():
                rows.append(row_of(shape, name, sequences, taken, seconds.get(LEAST)) | errors.get(name, {}))
                if not options.no_memory and name != HTTP:
                    rows[-1]["peak MiB"] = in_own_process(peak_mib, settings, name, shape, options.scale)
    report("trainer", rows, options.out, "Scored completion tokens a second, medians; time / least by the same round.")


def bound(method: Callable[..., Scored], *arguments: object) -> Callable[[], object]:
    return lambda: method(*arguments)


def score_in_batches(scorer: Scorer, sequences: list[Sequence]) -> list[object]:
    """Whole groups, about as many tokens at a time as a pass may have, like the service's queue."""
    outcomes: list[object] = []
    batch: list[Sequence] = []
    for _, members in groupby(sequences, key=lambda sequence: sequence.prompt.tobytes()):
        group = list(members)
        if batch and sum(s.num_tokens for s in batch + group) > scorer.budget.tokens:
            outcomes += scorer.score(batch)
            batch = []
        batch += group
    return outcomes + scorer.score(batch)


def over_http(folder: Path, settings: ModelSettings, sequences: list[Sequence], repeats: int) -> list[float]:
    """Seconds for all groups from many clients, each sending one group at a time; the first round is not counted."""
    arguments = [] if settings.model is None else ["--model", settings.model]
    flags = ["--precision", settings.precision, "--devices", settings.devices]
    bodies: list[dict[str, object]] = [
        {"groups": [{"prompt": next(iter(prompts)), "completions": completions}]}
        for prompts, completions in map(wire_group, groups_of(sequences))
    ]
    with running_service(folder / "log", *arguments, *flags) as running, ThreadPoolExecutor(CLIENTS) as pool:
        return [everybody(running, pool, bodies) for _ in range(repeats + 1)][1:]


def everybody(running: Running, pool: ThreadPoolExecutor, bodies: list[dict[str, object]]) -> float:
    def post(body: dict[str, object]) -> None:
        httpx.post(running.url + "/logprobs", json=body, timeout=600).raise_for_status()

    started = time.perf_counter()
    list(pool.map(post, bodies))
    return time.perf_counter() - started


def groups_of(sequences: list[Sequence]) -> list[list[Sequence]]:
    return [list(members) for _, members in groupby(sequences, key=lambda sequence: sequence.prompt.tobytes())]


def wire_group(group: list[Sequence]) -> tuple[list[list[int]], list[list[int]]]:
    return [group[0].prompt.tolist()], [sequence.completion.tolist() for sequence in group]


def errors_of(ours: Scorer, stock: torch.nn.Module, sequences: list[Sequence]) -> dict[str, Row]:
    """The largest difference from one by one, of every method that has right numbers, on the first group."""
    group = groups_of(sequences)[0]
    truth = np.concatenate(one_by_one(stock, group))  # type: ignore[arg-type]
    scored = np.concatenate([outcome.logprobs for outcome in ours.score(group) if isinstance(outcome, Scores)])
    errors = {OURS: {"max difference": float(np.abs(scored - truth).max())}}
    for name, method in METHODS.items():
        if name != LEAST:
            errors[name] = {"max difference": float(np.abs(np.concatenate(method(stock, group)) - truth).max())}  # type: ignore[arg-type]
    return errors


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
        METHODS[name](model, sequences[:1])
        return peak_of(lambda: METHODS[name](model, sequences), model.device) >> 20
