"""The processes of a worker with several devices: the first starts the others, and all end when one does.

The service knows the first one only. That one hands every batch on; each computes its part of it, in step with
the others.
"""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from logprobd.engine.model import find_device
from logprobd.engine.ranks import ALONE, Ranks
from logprobd.messages import Start

LONGEST_SKEW = timedelta(minutes=30)  # between processes that load


@dataclass(frozen=True, slots=True)
class Join:
    """The first message to every process but the first: its rank, and the file descriptor of where all meet."""

    start: Start
    rank: int
    meeting: int

    def __call__(self) -> Ranks:
        """Meet the others; returns when all are there."""
        names = devices_of(self.start)
        return meet(find_device(names[self.rank]), self.rank, len(names), self.meeting)


class Group:
    """A worker's processes, as the first of them has them; it is the only one where a worker has one device."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self.others: list[Connection[Any, Any]] = []

    def form(self) -> Ranks:
        """Start the others and meet them; raises ModelRefusedError if a device is not there."""
        devices = [find_device(name) for name in devices_of(self._start)]
        if len(devices) == 1:
            return ALONE
        meeting = os.memfd_create("logprobd-group", 0)  # in memory, and gone with the processes
        for rank in range(1, len(devices)):
            self.others.append(start_process(Join(self._start, rank, meeting)))
        return meet(devices[0], 0, len(devices), meeting)

    def pass_on(self, message: bytes) -> None:
        for other in self.others:
            other.send_bytes(message)


def devices_of(start: Start) -> list[str]:
    """The names of a worker's devices."""
    return start.device.split("+")


def start_process(join: Join) -> "Connection[Any, Any]":
    """Start one of the other processes; this one ends as soon as that one does."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "logprobd.engine.worker", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno(), join.meeting], stdin=subprocess.DEVNULL)
    theirs.close()
    Thread(target=end_with, args=(process,), daemon=True, name="group").start()
    connection: Connection[Any, Any] = Connection(ours.detach())
    connection.send(join)
    return connection


def end_with(process: "subprocess.Popen[bytes]") -> None:
    process.wait()
    os._exit(1)


def meet(device: torch.device, rank: int, size: int, meeting: int) -> Ranks:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers puts a model on whatever accelerator there is
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside this machine is to take part
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # by which transformers finds a process's GPU
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{meeting}", size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=LONGEST_SKEW,
        device_id=device if device.type == "cuda" else None,
    )
    return Ranks(rank, size, device)
