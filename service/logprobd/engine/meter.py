"""What memory a worker uses on its device: resident memory on a CPU, the allocator's on CUDA."""

import contextlib
import ctypes
import gc
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil
import torch

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
SAMPLE_SECONDS = 0.001


class Meter(Protocol):
    """Bytes in use beyond `baseline`, what the process had before it loaded anything."""

    baseline: int

    def used(self) -> int: ...

    def peak(self) -> int:
        """The most that was in use since the last reset."""

    def reset_peak(self) -> None: ...

    def release(self) -> None:
        """Give what the allocator keeps for later back to the device."""

    def available(self) -> int:
        """What this process may still take without pushing anyone out."""

    def total(self) -> int:
        """What the device has."""

    def cap(self, limit: int) -> None:
        """Have the allocator refuse what goes beyond the limit, where it can."""


def meter_of(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


class CpuMeter:
    """Resident memory, from the moment when this was made."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._trim = trim_of_libc()
        self.release()
        self.baseline = self._process.memory_info().rss
        self._sampler: _Sampler | None = None

    def used(self) -> int:
        return self._process.memory_info().rss - self.baseline

    def peak(self) -> int:
        most = self._sampler.peak if self._sampler else high_water_mark()
        return max(most - self.baseline, self.used())

    def reset_peak(self) -> None:
        """By the kernel's own mark; where it cannot be reset, by looking a thousand times a second."""
        try:
            CLEAR_REFS.write_text("5")
        except OSError:
            self._sampler = self._sampler or _Sampler(self._process)
            self._sampler.peak = 0

    def release(self) -> None:
        gc.collect()
        if self._trim is not None:
            self._trim(0)

    def available(self) -> int:
        return min(psutil.virtual_memory().available, self.total() - self._process.memory_info().rss)

    def total(self) -> int:
        """The machine's, or what the control group of a container allows."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            return min(psutil.virtual_memory().total, int(CGROUP_LIMIT.read_text()))
        return psutil.virtual_memory().total

    def cap(self, limit: int) -> None:
        """Nothing on a CPU could refuse memory without endangering the process: the plan keeps the limit."""


class CudaMeter:
    """What torch's allocator has given out on one GPU."""

    baseline = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def available(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def total(self) -> int:
        return torch.cuda.get_device_properties(self._device).total_memory

    def cap(self, limit: int) -> None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / self.total()), self._device)


class _Sampler:
    """The highest resident memory that a thread saw."""

    def __init__(self, process: psutil.Process) -> None:
        self.peak = 0
        self._process = process
        self._pause = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="memory-sampler").start()

    def _watch(self) -> None:
        while not self._pause.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._process.memory_info().rss)


def high_water_mark() -> int:
    """The kernel's record of the most resident memory, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found.group(1)) * 1024 if found else 0


def trim_of_libc() -> Callable[[int], int] | None:
    """glibc's malloc_trim; other C libraries have none, and do without."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return None
