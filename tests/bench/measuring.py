"""Time and memory: medians of methods that take turns, and peaks in a process of their own."""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from logprobd.engine.meter import meter_of

T = TypeVar("T")


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def take_turns(works: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each work, all of them once a round: what disturbs the machine disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            seconds[name].append(seconds_of(work, device))
    return seconds


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """The most memory in use at a time beyond what was before (resident, or the CUDA allocator's), in bytes."""
    meter = meter_of(device)
    meter.release()
    before = meter.used()
    meter.reset_peak()
    work()
    return max(0, meter.peak() - before)


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function in a fresh process, whose memory nothing else has touched."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
