"""A Python process of our own at the other end of a socket pair, with which objects are exchanged in order.

Its death reaches us as the end of the stream. Sending and receiving block, so each has a thread of its own.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

# MKL's kernels depend on the number of rows unless it is asked for strictly reproducible ones (which cost
# nothing measurable): with them a sequence gets the same bits whatever shares its batch.
REPRODUCIBLE_MKL = {"MKL_CBWR": "AUTO,STRICT"}


@dataclass(eq=False)
class OwnProcess:
    """One life of a process, and our end of the socket pair."""

    process: asyncio.subprocess.Process
    connection: "Connection[Any, Any]"
    _sending: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "process-send"))
    _receiving: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "process-receive"))
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def exchange(self, message: object) -> Any:
        """Send a message and return its answer; raises EOFError or OSError if the process ends before."""
        async with self._turn:  # answers come in the order of the messages
            await asyncio.get_running_loop().run_in_executor(self._sending, partial(self.connection.send, message))
            answer = self.receive()
        return await answer

    def receive(self) -> asyncio.Future[Any]:
        """The next object that the process sends."""
        return asyncio.get_running_loop().run_in_executor(self._receiving, self.connection.recv)

    def kill(self) -> None:
        """Not by asyncio's own kill: that polls first, and may take the exit status from whoever waits for it."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kill it if it lives, and return its exit status."""
        self.kill()
        code = await self.process.wait()
        self.connection.close()
        self._sending.shutdown(wait=False)
        self._receiving.shutdown(wait=False)
        return code


async def spawn(module: str) -> OwnProcess:
    """Start `python -m MODULE FD`, where FD is the process's end of the socket pair."""
    ours, theirs = socket.socketpair()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            env=REPRODUCIBLE_MKL | os.environ,
        )
    finally:
        theirs.close()  # the process's death must reach us as the end of the stream
    return OwnProcess(process, Connection(ours.detach()))


def how_it_ended(code: int) -> dict[str, int]:
    """An exit status for the log."""
    return {"signal": -code} if code < 0 else {"exit_code": code}
