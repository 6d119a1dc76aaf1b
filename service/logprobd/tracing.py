"""OpenTelemetry spans of requests, if the SDK is installed and its usual environment variables ask for them."""

import os
from contextlib import AbstractContextManager

import structlog
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import Scope

ASKED_BY = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = structlog.get_logger(__name__)


def configure() -> None:
    """Export spans where OTEL_EXPORTER_OTLP_ENDPOINT points; without it a span costs next to nothing."""
    if not any(os.environ.get(name) for name in ASKED_BY) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("tracing is asked for, but not installed: pip install 'logprobd[otel]'")
        return
    os.environ.setdefault("OTEL_SERVICE_NAME", "logprobd")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def request_span(scope: Scope, request_id: str) -> AbstractContextManager[Span]:
    """A server span of a request, below the caller's if it sent a traceparent."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    attributes = {"http.request.method": scope["method"], "url.path": scope["path"], "logprobd.request_id": request_id}
    return trace.get_tracer("logprobd").start_as_current_span(
        f"{scope['method']} {scope['path']}",
        context=propagate.extract(headers),
        kind=SpanKind.SERVER,
        attributes=attributes,
    )


def end_span(span: Span, status: int, timings: dict[str, float], sizes: dict[str, int]) -> None:
    """Write a request's outcome into its span."""
    span.set_attribute("http.response.status_code", status)
    for name, seconds in timings.items():
        span.set_attribute(f"logprobd.{name}_seconds", seconds)
    for name, size in sizes.items():
        span.set_attribute(f"logprobd.{name}", size)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
