"""A real service in a process of its own, on a loopback port, for the tests to talk to."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]

WIRES = (True, False)
"""Whether ids go in the binary form: the tests of the client talk to the service in all of these ways."""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without LOGPROBD_*, with the checkout's sources, plus what is given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOGPROBD_")}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT / "service"), str(ROOT / "clients")])} | variables


def run_cli(*arguments: str, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "logprobd", *arguments]
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=timeout)


def run_python(script: str) -> str:
    """What a script prints in a process of its own."""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return result.stdout.strip()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass
class Running:
    """A service that was started, and where it is."""

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, body: object, timeout: float = 120) -> httpx.Response:
        return httpx.post(self.url + "/logprobs", json=body, timeout=timeout)

    def worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.get("/info").json()["workers"]]

    def wait_for(self, path: str, status: int = 200, seconds: float = 120) -> httpx.Response:
        """Ask until the answer has this status; fails with the log if that takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if (response := self.get(path)).status_code == status:
                    return response
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"{path} never answered {status}; log:\n{self.log}")

    def stop(self, seconds: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def running_service(
    log_file: Path, *arguments: str, ready: bool = True, port: int | None = None, **variables: str
) -> Iterator[Running]:
    """Start `logprobd serve`, wait until it is ready, and stop it at the end."""
    port = free_port() if port is None else port
    command = [sys.executable, "-m", "logprobd", "serve", "--port", str(port), *arguments]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env=environment(**variables), stdout=log, stderr=log)
    running = Running(process, f"http://127.0.0.1:{port}", log_file)
    try:
        if ready:
            running.wait_for("/readyz")
        yield running
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
