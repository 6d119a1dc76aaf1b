"""How time and memory grow: over completion length, prompt length, group, vocabulary and concurrent clients.

    .venv/bin/python tests/bench growth [--quick] [--repeats 3] [--device auto] --out docs/bench

Ours in-process beside padded batches with a full log-softmax, on the embedded model (for the vocabulary, tiny random
models); clients send one group each to a real service at the same time. The plot has a panel for each.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.measuring import in_own_process, median, peak_of, seconds_of
from bench.models import settings_for, small_random_llama
from bench.report import Row, report
from bench.serving import serving
from bench.stock import padded_full
from logprobd.engine.model import LoadedModel, Source, describe, find_device, load, prepare
from logprobd.engine.scorer import Scorer
from logprobd.messages import TokenizerInfo
from logprobd.sequences import Options, Sequence
from logprobd.settings import ModelSettings

OURS, PADDED = "ours", "padded, full log-softmax"
PROMPT, COMPLETION, GROUP, VOCABULARY = 128, 64, 4, 49152
AXES: dict[str, list[int]] = {
    "completion tokens": [32, 64, 128, 256, 512],
    "prompt tokens": [64, 128, 256, 512, 1024],
    "completions of a prompt": [1, 2, 4, 8, 16],
    "vocabulary": [32_768, 65_536, 131_072, 262_144],
}
CLIENTS_AXIS = "concurrent clients"
CLIENTS = [1, 2, 4, 8, 16, 32]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="two points an axis")
    parser.add_argument("--axes", default=",".join([*AXES, CLIENTS_AXIS]))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")


def run(options: argparse.Namespace) -> None:
    device = find_device(options.device)
    axes = options.axes.split(",")
    rows: list[Row] = []
    for axis, values in AXES.items():
        for value in (values[:2] if options.quick else values) if axis in axes else []:
            for method in (OURS, PADDED):
                figures = in_own_process(measured, method, axis, value, str(device), options.repeats)
                rows.append({"axis": axis, "value": value, "method": method} | figures)
    if CLIENTS_AXIS in axes:
        rows += over_clients(CLIENTS[:2] if options.quick else CLIENTS, device, options.repeats)
    report("growth", rows, options.out)
    if options.out is not None:
        plot(rows, options.out / "growth.png")


def measured(method: str, axis: str, value: int, device_name: str, repeats: int) -> Row:
    """Seconds and the peak in MiB of one point, in a process of its own."""
    device = torch.device(device_name)
    vocab = value if axis == "vocabulary" else VOCABULARY
    prompt = value if axis == "prompt tokens" else PROMPT
    completion = value if axis == "completion tokens" else COMPLETION
    sequences = one_group(prompt, completion, value if axis == "completions of a prompt" else GROUP, vocab)
    loaded = tiny(vocab, device) if axis == "vocabulary" else loaded_by_default(device)
    score: Callable[[list[Sequence]], object] = (
        Scorer(loaded, "shared").score if method == OURS else partial(padded_full, loaded.model)
    )
    with torch.inference_mode():
        score(sequences[:1])
        seconds = median([seconds_of(lambda: score(sequences), device) for _ in range(repeats)])
        return {"seconds": round(seconds, 3), "peak MiB": peak_of(lambda: score(sequences), device) >> 20}


def loaded_by_default(device: torch.device) -> LoadedModel:
    return load(settings_for(None, None, device), device, tell=lambda _: None)


def tiny(vocab: int, device: torch.device) -> LoadedModel:
    model = prepare(small_random_llama(vocab), device)
    return describe(model, Source("tiny", "tiny"), ModelSettings(), device, TokenizerInfo(None, None))


def one_group(prompt: int, completion: int, group: int, vocab: int, seed: int = 0) -> list[Sequence]:
    random = np.random.default_rng(seed)
    shared = random.integers(0, vocab, prompt).astype(np.int32)
    return [Sequence(shared, random.integers(0, vocab, completion).astype(np.int32), Options()) for _ in range(group)]


def over_clients(counts: list[int], device: torch.device, repeats: int) -> list[Row]:
    """Each client sends one group of its own at the same time; all of them are waited for.

    The peak is the worker's since its start, so it never falls from one count to the next.
    """
    rows: list[Row] = []
    with serving(settings_for(None, None, device), max(counts)) as service:
        service.score(one_group(64, 32, GROUP, VOCABULARY))
        for count in counts:
            sequences = [one for seed in range(count) for one in one_group(64, 32, GROUP, VOCABULARY, seed)]
            once = partial(service.score, sequences)
            seconds = median([seconds_of(once, device) for _ in range(repeats)])
            row: Row = {"axis": CLIENTS_AXIS, "value": count, "method": OURS, "seconds": round(seconds, 3)}
            rows.append(row | {"peak MiB": service.peak_mib()})
    return rows


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
