"""What is counted: read from a real service by Prometheus' own parser."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from running import Running, running_service

GROUP = {"prompt": [1, 2, 3, 4], "completions": [[5, 6], [7, 8], [9]]}


def values_of(running: Running) -> dict[str, float]:
    """Every sample as `name{labels}`, as Prometheus reads it."""
    families = text_string_to_metric_families(running.get("/metrics").text)
    return {key_of(sample.name, sample.labels): sample.value for family in families for sample in family.samples}


def key_of(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f"{label}={value}" for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name


@pytest.fixture
def running(tiny_folder: Path, tmp_path: Path) -> Iterator[Running]:
    with running_service(tmp_path / "log", "--model", str(tiny_folder), "--max-queued-tokens", "100") as service:
        yield service


def test_requests_tokens_batches_and_memory_are_counted(running: Running) -> None:
    running.post(GROUP)
    running.post({"prompt": [1], "completions": [[2] * 200]})
    running.post({"prompt": []})
    running.get("/nowhere/" + "x" * 50)
    values = values_of(running)

    assert values["logprobd_requests_total{route=/logprobs,status=200}"] == 1
    assert values["logprobd_requests_total{route=/logprobs,status=413}"] == 1
    assert values["logprobd_requests_total{route=/logprobs,status=422}"] == 1
    assert values["logprobd_requests_total{route=other,status=404}"] == 1
    assert values["logprobd_sequences_total"] == 3
    assert values["logprobd_sequence_tokens_total"] == 17
    assert values["logprobd_computed_tokens_total"] == 6  # the prompt once, and two first tokens
    assert values["logprobd_scored_tokens_total"] == 5
    assert values["logprobd_batch_sequences_count"] == values["logprobd_forward_seconds_count"] == 1
    assert values["logprobd_batch_sequences_sum"] == 3
    assert values["logprobd_queue_seconds_count"] == 1
    assert values["logprobd_request_seconds_count{route=/logprobs}"] == 3
    assert values["logprobd_ready"] == values["logprobd_worker_ready{worker=0:auto}"] == 1
    assert values["logprobd_queued_requests"] == values["logprobd_queued_tokens"] == 0
    assert values["logprobd_max_queued_tokens"] == 100
    assert values["logprobd_weights_version"] == 0
    limit = values["logprobd_worker_memory_limit_bytes{worker=0:auto}"]
    assert 0 < values["logprobd_worker_memory_used_bytes{worker=0:auto}"] <= limit
    assert 0 < values["logprobd_worker_memory_peak_bytes{worker=0:auto}"] <= limit
    model = running.get("/info").json()["model"]
    labels = {"fingerprint": model["fingerprint"], "layout": "shared", "model": model["id"], "precision": "float32"}
    assert values[key_of("logprobd_model_info", labels)] == 1


def test_every_reply_says_what_its_time_went_to(running: Running) -> None:
    scored, refused = running.post(GROUP).headers, running.post({}).headers

    assert re.fullmatch(r"queue;dur=[\d.]+, forward;dur=[\d.]+, total;dur=[\d.]+", scored["server-timing"])
    assert re.fullmatch(r"total;dur=[\d.]+", refused["server-timing"])
    parts = dict(part.split(";dur=") for part in scored["server-timing"].split(", "))
    assert float(parts["queue"]) + float(parts["forward"]) <= float(parts["total"])


def test_polling_does_not_fill_the_log_and_scoring_leaves_its_sizes(running: Running) -> None:
    running.post(GROUP)
    for path in ("/healthz", "/readyz", "/metrics"):
        running.get(path)
    lines = [line for line in running.log.splitlines() if "request_id" in line]

    assert len(lines) == 1
    for part in ("sequences=3", "tokens=9", "queue=", "forward=", "status=200", "path=/logprobs"):
        assert part in lines[0]
