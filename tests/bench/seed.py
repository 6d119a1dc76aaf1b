"""The table of the pull request that the project grew from: four ways from logits, and ours from hidden states.

    .venv/bin/python tests/bench seed [--vocab 150000] [--rows 8 --tokens 128] [--device auto]

8 sequences of 512 tokens with 128 scored each, a vocabulary of 150,000, as in TRL's pull request 2773. The four ways
get finished logits as their input; a trainer has hidden states, so a second figure of memory counts from there, with
the logits made by the head. Ours starts from hidden states and never has more than a chunk of logits. Memory is the
peak beyond the inputs, each in a process of its own; errors are against float64.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch

from bench.measuring import in_own_process, median, peak_of, seconds_of
from bench.report import Row, report
from logprobd.engine.model import find_device
from logprobd.engine.selective import Targets, select

HIDDEN = 512
CHUNKS = (16, 32)  # rows of logits at a time, of ours

FromLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def original(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A log-softmax of everything, row by row, then a gather."""
    return torch.stack(
        [row.log_softmax(-1).gather(1, own[:, None])[:, 0] for row, own in zip(logits, ids, strict=True)]
    )


def method_1(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gather and subtract the logsumexp, row by row."""
    return torch.stack(
        [row.gather(1, own[:, None])[:, 0] - row.logsumexp(-1) for row, own in zip(logits, ids, strict=True)]
    )


def method_2(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One gather, the logsumexp row by row: what was merged."""
    return logits.gather(-1, ids[..., None])[..., 0] - torch.stack([row.logsumexp(-1) for row in logits])


def one_logsumexp(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One gather, one logsumexp over everything: proposed in the discussion."""
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


FROM_LOGITS: dict[str, FromLogits] = {
    "original: log-softmax, then gather": original,
    "method 1: gather - logsumexp, row by row": method_1,
    "method 2: gather outside, logsumexp row by row": method_2,
    "one logsumexp over everything": one_logsumexp,
}


def ours(chunk_rows: int) -> str:
    return f"ours, {chunk_rows} rows of logits at a time"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")


def run(options: argparse.Namespace) -> None:
    sizes = (options.rows, options.tokens, options.vocab, str(find_device(options.device)))
    rows: list[Row] = []
    for name in [*FROM_LOGITS, *map(ours, CHUNKS)]:
        from_logits, from_hidden = in_own_process(milliseconds, name, sizes, options.repeats)
        row: Row = {"method": name, "ms from logits": from_logits, "ms from hidden states": from_hidden}
        given, made = in_own_process(peaks, name, sizes)
        row |= {"peak MB beyond inputs": given, "peak MB from hidden states": made}
        rows.append(row | {"max difference from float64": in_own_process(error, name, sizes)})
    report("seed", rows, options.out, "Ours has no logits to start from: its time includes the head.")


def inputs(sizes: tuple[int, int, int, str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states (rows, tokens, HIDDEN), the head's weight, and the ids that were sampled."""
    num_rows, tokens, vocab, device = sizes
    random = torch.Generator().manual_seed(42)
    hidden = torch.randn(num_rows, tokens, HIDDEN, generator=random)
    weight = torch.randn(vocab, HIDDEN, generator=random) / HIDDEN**0.5
    ids = torch.randint(0, vocab, (num_rows, tokens), generator=random)
    return hidden.to(device), weight.to(device), ids.to(device)


def work_of(name: str, hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The method from hidden states on; for ours that is all there is."""
    if name in FROM_LOGITS:
        return lambda: FROM_LOGITS[name](hidden @ weight.T, ids)
    (chunk_rows,) = (rows for rows in CHUNKS if ours(rows) == name)
    states, count = hidden.flatten(0, 1), ids.numel()
    targets = Targets(
        rows=np.arange(count, dtype=np.int32),
        ids=ids.flatten().cpu().numpy().astype(np.int32),
        temperatures=np.ones(count, dtype=np.float32),
        entropy=np.zeros(count, dtype=bool),
        top_logprobs=np.zeros(count, dtype=np.int32),
        ranks=np.zeros(count, dtype=bool),
        candidate_ids=np.zeros(0, dtype=np.int32),
        candidate_owners=np.zeros(0, dtype=np.int32),
    )
    return lambda: torch.from_numpy(
        select(lambda rows: rows @ weight.T, [(0, states)], targets, chunk_rows, states.device).logprobs
    ).reshape(ids.shape)


@torch.inference_mode()
def milliseconds(name: str, sizes: tuple[int, int, int, str], repeats: int) -> tuple[float | None, float]:
    """From logits, for the methods that start there, and from hidden states."""
    hidden, weight, ids = inputs(sizes)
    made = median_of(work_of(name, hidden, weight, ids), repeats, hidden.device)
    if name not in FROM_LOGITS:
        return None, made
    logits = hidden @ weight.T
    return median_of(lambda: FROM_LOGITS[name](logits, ids), repeats, hidden.device), made


def median_of(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Milliseconds, after one round that is not counted."""
    seconds_of(work, device)
    return round(1000 * median([seconds_of(work, device) for _ in range(repeats)]), 1)


@torch.inference_mode()
def peaks(name: str, sizes: tuple[int, int, int, str]) -> tuple[float, float]:
    """MB beyond the inputs, and beyond the hidden states and the head's weight."""
    hidden, weight, ids = inputs(sizes)
    hidden[:, :1] @ weight.T  # what the library sets up on first use
    work = work_of(name, hidden, weight, ids)
    made = peak_of(work, hidden.device) / 1e6
    if name not in FROM_LOGITS:
        return round(made, 1), round(made, 1)
    logits = hidden @ weight.T
    return round(peak_of(lambda: FROM_LOGITS[name](logits, ids), hidden.device) / 1e6, 1), round(made, 1)


@torch.inference_mode()
def error(name: str, sizes: tuple[int, int, int, str]) -> float:
    """Against a float64 log-softmax of the float32 logits, one sequence at a time."""
    hidden, weight, ids = inputs(sizes)
    got = work_of(name, hidden, weight, ids)().cpu()
    truth = torch.stack(
        [
            (row @ weight.T).double().log_softmax(-1).gather(1, own[:, None])[:, 0]
            for row, own in zip(hidden, ids, strict=True)
        ]
    )
    return float((got.double() - truth.cpu()).abs().max())
