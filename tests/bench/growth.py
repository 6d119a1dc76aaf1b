"""How time and memory grow: over completion length, prompt length, group, vocabulary and concurrent clients.

    .venv/bin/python tests/bench growth [--quick] --out docs/bench

Ours in-process beside padded batches with a full log-softmax, on the embedded model (for the vocabulary, tiny random
models); clients send one group each to a real service at the same time. The plot has a panel for each.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.measuring import in_own_process, peak_of, seconds_of
from bench.models import small_random_llama, stock_model
from bench.report import Row, report
from bench.stock import padded_full
from logprobd.engine.model import LoadedModel, Source, describe, load, prepare
from logprobd.engine.scorer import Scorer
from logprobd.messages import TokenizerInfo
from logprobd.sequences import Options, Sequence
from logprobd.settings import ModelSettings
from running import running_service

CPU = torch.device("cpu")
OURS, PADDED = "ours", "padded, full log-softmax"
PROMPT, COMPLETION, GROUP, VOCABULARY = 128, 64, 4, 49152
AXES: dict[str, list[int]] = {
    "completion tokens": [32, 64, 128, 256, 512],
    "prompt tokens": [64, 128, 256, 512, 1024],
    "completions of a prompt": [1, 2, 4, 8, 16],
    "vocabulary": [32_768, 65_536, 131_072, 262_144],
}
CLIENTS = [1, 2, 4, 8, 16, 32]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="two points an axis")


def run(options: argparse.Namespace) -> None:
    rows: list[Row] = []
    for axis, values in AXES.items():
        for value in values[:2] if options.quick else values:
            for method in (OURS, PADDED):
                seconds, peak = in_own_process(measured, method, axis, value)
                rows.append({"axis": axis, "value": value, "method": method, "seconds": seconds, "peak MiB": peak})
    rows += over_clients(CLIENTS[:2] if options.quick else CLIENTS)
    report("growth", rows, options.out)
    if options.out is not None:
        plot(rows, options.out / "growth.png")


def measured(method: str, axis: str, value: int) -> tuple[float, int]:
    """Seconds and the peak in MiB of one point, in a process of its own."""
    vocab = value if axis == "vocabulary" else VOCABULARY
    prompt = value if axis == "prompt tokens" else PROMPT
    completion = value if axis == "completion tokens" else COMPLETION
    sequences = one_group(prompt, completion, value if axis == "completions of a prompt" else GROUP, vocab)
    score = our_way(vocab, axis) if method == OURS else padded_way(vocab, axis)
    with torch.inference_mode():
        score(sequences[:1])
        seconds = seconds_of(lambda: score(sequences), CPU)
        return round(seconds, 3), peak_of(lambda: score(sequences), CPU) >> 20


def our_way(vocab: int, axis: str) -> Callable[[list[Sequence]], object]:
    loaded = tiny(vocab) if axis == "vocabulary" else load(ModelSettings(), CPU, tell=lambda _: None)
    return Scorer(loaded, "shared").score


def padded_way(vocab: int, axis: str) -> Callable[[list[Sequence]], object]:
    model = small_random_llama(vocab) if axis == "vocabulary" else stock_model(ModelSettings(devices="cpu"))
    return partial(padded_full, model)


def tiny(vocab: int) -> LoadedModel:
    model = prepare(small_random_llama(vocab), CPU)
    return describe(model, Source("tiny", "tiny"), ModelSettings(), CPU, TokenizerInfo(None, None))


def one_group(prompt: int, completion: int, group: int, vocab: int) -> list[Sequence]:
    random = np.random.default_rng(0)
    shared = random.integers(0, vocab, prompt).astype(np.int32)
    return [Sequence(shared, random.integers(0, vocab, completion).astype(np.int32), Options()) for _ in range(group)]


def over_clients(clients: list[int]) -> list[Row]:
    """Each client sends one group of its own at the same time; all of them are waited for."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, running_service(Path(folder) / "log") as running:
        for count in clients:
            bodies = [body_of(seed) for seed in range(count)]
            with ThreadPoolExecutor(count) as pool:
                started = time.perf_counter()
                replies = list(pool.map(partial(running.post, timeout=600), bodies))
            seconds = time.perf_counter() - started
            assert all(reply.status_code == 200 for reply in replies), replies
            peak = running.get("/info").json()["workers"][0]["memory"]["peak"]
            rows.append(
                {
                    "axis": "concurrent clients",
                    "value": count,
                    "method": OURS,
                    "seconds": round(seconds, 3),
                    "peak MiB": peak >> 20,
                }
            )
    return rows


def body_of(seed: int) -> dict[str, object]:
    random = np.random.default_rng(seed)
    completions = random.integers(0, VOCABULARY, (GROUP, 32)).tolist()
    return {"prompt": random.integers(0, VOCABULARY, 64).tolist(), "completions": completions}


def plot(rows: list[Row], file: Path) -> None:
    """A column of panels for each axis: seconds above, memory below."""
    from matplotlib.figure import Figure  # only where a plot is asked for

    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figure = Figure(figsize=(3.6 * len(axes), 6), layout="constrained")
    panels = figure.subplots(2, len(axes), squeeze=False)
    for column, axis in enumerate(axes):
        for line, key in enumerate(("seconds", "peak MiB")):
            panel = panels[line, column]
            for method in dict.fromkeys(row["method"] for row in rows if row["axis"] == axis):
                points = [(row["value"], row[key]) for row in rows if (row["axis"], row["method"]) == (axis, method)]
                panel.plot(*zip(*points, strict=True), marker="o", label=method)
            panel.set(xlabel=axis, ylabel=key, ylim=(0, None))
            panel.grid(alpha=0.3)
    panels[0, 0].legend()
    figure.savefig(file, dpi=110)
