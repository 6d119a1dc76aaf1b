"""A worker process's threads: what cannot be read or written ends the worker, so that nobody waits in vain."""

import socket
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import UnpicklingError
from queue import Queue
from typing import Any

import pytest

from logprobd.engine.group import Group
from logprobd.engine.worker import read
from logprobd.messages import Start
from logprobd.settings import ModelSettings
from running import Running, run_python


def alone() -> Group:
    return Group(Start(ModelSettings(), "cpu", None))


def test_the_end_of_the_stream_ends_the_batches() -> None:
    ours, theirs = socket.socketpair()
    batches: Queue[Any] = Queue()
    sender: Connection[Any, Any] = Connection(ours.detach())
    sender.send(["a batch"])
    sender.close()
    receiver: Connection[Any, Any] = Connection(theirs.detach())
    read(receiver, batches, alone())
    receiver.close()

    assert [batches.get(timeout=5) for _ in range(2)] == [["a batch"], None]


def test_a_message_that_cannot_be_read_ends_the_batches_too() -> None:
    ours, theirs = socket.socketpair()
    batches: Queue[Any] = Queue()
    sender: Connection[Any, Any] = Connection(ours.detach())
    sender.send_bytes(b"no pickle")

    with Connection(theirs.detach()) as receiver, pytest.raises(UnpicklingError):
        read(receiver, batches, alone())
    sender.close()
    assert batches.get(timeout=5) is None


def test_an_answer_that_cannot_be_sent_ends_the_process() -> None:
    script = (
        "import os\n"
        "from concurrent.futures import Future\n"
        "from logprobd.engine.worker import end_if_lost\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    lost = Future()\n"
        "    lost.set_exception(ValueError('cannot be sent'))\n"
        "    end_if_lost(lost)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )

    assert run_python(script) == "1"


def test_what_a_worker_says_of_itself_does_not_bring_torch_into_the_http_process(tiny_service: Running) -> None:
    torch_version = tiny_service.get("/info").json()["versions"]["torch"]
    mapped = Path(f"/proc/{tiny_service.process.pid}/maps").read_text()

    assert torch_version
    assert "numpy" in mapped
    assert "libtorch" not in mapped
