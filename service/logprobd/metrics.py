"""Prometheus metrics of the service: what is counted as it happens, and what is read off when somebody asks."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from logprobd.batcher import Ran
from logprobd.messages import Ready, WorkerStatus

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = tuple(4**power for power in range(2, 10))
SEQUENCES = tuple(4**power for power in range(8))


class Watched(Protocol):
    """What gauges are read off."""

    @property
    def ready(self) -> Ready | None: ...

    @property
    def workers(self) -> list[WorkerStatus]: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def queue(self) -> dict[str, int]: ...

    @property
    def limits(self) -> dict[str, int | float]: ...


class Metrics:
    """One service's metrics, in a registry of their own."""

    def __init__(self, watched: Watched) -> None:
        self.registry = CollectorRegistry()
        of = self.registry
        self.requests = Counter("logprobd_requests", "requests answered", ["route", "status"], registry=of)
        self.request_seconds = Histogram(
            "logprobd_request_seconds",
            "from a request's head to its answer's end",
            ["route"],
            buckets=SECONDS,
            registry=of,
        )
        self.queue_seconds = Histogram(
            "logprobd_queue_seconds", "from admission to a request's first batch", buckets=SECONDS, registry=of
        )
        self.forward_seconds = Histogram("logprobd_forward_seconds", "of a batch", buckets=SECONDS, registry=of)
        self.batch_tokens = Histogram("logprobd_batch_tokens", "computed by a batch", buckets=TOKENS, registry=of)
        self.batch_sequences = Histogram("logprobd_batch_sequences", "of a batch", buckets=SEQUENCES, registry=of)
        self.sequences = Counter("logprobd_sequences", "sequences answered", registry=of)
        self.sequence_tokens = Counter(
            "logprobd_sequence_tokens", "of all sequences, as if nothing were shared", registry=of
        )
        self.computed_tokens = Counter("logprobd_computed_tokens", "that went through the model", registry=of)
        self.scored_tokens = Counter("logprobd_scored_tokens", "of completions", registry=of)
        self.registry.register(_Watching(watched))

    def ran(self, ran: Ran) -> None:
        """Count a batch."""
        self.forward_seconds.observe(ran.forward_seconds)
        for seconds in ran.queue_seconds:
            self.queue_seconds.observe(seconds)
        self.batch_tokens.observe(ran.computed_tokens)
        self.batch_sequences.observe(ran.sequences)
        self.sequences.inc(ran.sequences)
        self.sequence_tokens.inc(ran.sequence_tokens)
        self.computed_tokens.inc(ran.computed_tokens)
        self.scored_tokens.inc(ran.scored_tokens)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _Watching:
    """Gauges and counters of what others keep, collected when asked."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        watched = self._watched
        yield gauge("ready", "whether every worker is up and its last batch succeeded", float(watched.is_ready))
        for name, value in watched.queue.items():
            yield gauge(f"queued_{name}", "admitted and not yet answered", value)
        limits = watched.limits
        for name in ("max_queued_tokens", "max_batch_tokens"):
            if name in limits:
                yield gauge(name, "the limit", limits[name])
        if watched.ready is not None:
            yield gauge("weights_version", "of the served weights", watched.ready.model.weights_version)
            yield model_info(watched.ready)
        yield from self._of_workers()

    def _of_workers(self) -> Iterator[Metric]:
        up = worker_gauge("ready", "whether the worker is up")
        used = worker_gauge("memory_used_bytes", "of its device, between batches")
        peak = worker_gauge("memory_peak_bytes", "of its device, the most since it started serving")
        limit = worker_gauge("memory_limit_bytes", "of its device, that it keeps within")
        restarts = CounterMetricFamily("logprobd_worker_restarts", "after an end or a hang", labels=["worker"])
        halvings = CounterMetricFamily(
            "logprobd_out_of_memory_halvings", "of a pass, since the worker started", labels=["worker"]
        )
        for worker in self._watched.workers:
            label = [worker.name]
            up.add_metric(label, float(worker.state == "ready"))
            restarts.add_metric(label, worker.restarts)
            halvings.add_metric(label, worker.out_of_memory_halvings)
            for family, value in (
                (used, worker.memory_used),
                (peak, worker.memory_peak),
                (limit, worker.memory_limit),
            ):
                if value is not None:
                    family.add_metric(label, value)
        yield from (up, used, peak, limit, restarts, halvings)


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"logprobd_{name}", text, value=value)


def worker_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"logprobd_worker_{name}", text, labels=["worker"])


def model_info(ready: Ready) -> GaugeMetricFamily:
    labels = {
        "model": ready.model.id,
        "fingerprint": ready.model.fingerprint,
        "precision": ready.model.precision,
        "layout": ready.selftest.layout,
    }
    info = GaugeMetricFamily("logprobd_model_info", "the served model, always 1", labels=list(labels))
    info.add_metric(list(labels.values()), 1)
    return info
