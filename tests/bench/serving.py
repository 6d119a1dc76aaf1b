"""A real service and clients that ask it at the same time, for benchmarks over HTTP."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.stock import Scored
from bench.workloads import groups_of
from logprobd.sequences import Sequence
from logprobd.settings import ModelSettings
from logprobd_client.client import Client
from running import Running, running_service


@dataclass(frozen=True, slots=True, eq=False)
class Service:
    """A running service, and as many clients as the pool has threads; they share one pool of connections."""

    running: Running
    client: Client
    pool: ThreadPoolExecutor

    def score(self, sequences: list[Sequence]) -> Scored:
        """All groups, each client sending one at a time."""
        return [own for group in self.pool.map(self._score_group, groups_of(sequences)) for own in group]

    def _score_group(self, group: list[Sequence]) -> Scored:
        completions = [sequence.completion for sequence in group]
        logprobs: list[Scored] = self.client.score([group[0].prompt], [completions]).logprobs
        return logprobs[0]

    def peak_mib(self) -> int:
        """The most that a worker has taken so far, beyond what it takes between batches."""
        info = self.running.get("/info").json()
        peak: int = max(worker["memory"]["peak"] for worker in info["workers"]) - info["memory"]["idle"]
        return max(0, peak) >> 20


@contextmanager
def serving(settings: ModelSettings, clients: int) -> Iterator[Service]:
    model = [] if settings.model is None else ["--model", settings.model]
    flags = ["--precision", settings.precision, "--devices", settings.devices]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_service(Path(folder) / "log", *model, *flags) as running,
        Client(running.url) as client,
        ThreadPoolExecutor(clients) as pool,
    ):
        yield Service(running, client, pool)
