"""Structured logs, for people (console) or machines (json), and the one line that each request gets."""

import logging
import re
import sys
import time
import uuid
from typing import Literal

import structlog
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logprobd import timings, tracing
from logprobd.errors import ApiError
from logprobd.metrics import Metrics
from logprobd.responses import error_response

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

POLLED = frozenset({"/healthz", "/readyz", "/health", "/metrics"})  # not worth a line each time

HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}

log = structlog.get_logger("logprobd.request")


def configure(log_format: Literal["console", "json"]) -> None:
    """Send structlog's and the standard library's lines through one renderer to stderr."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    tracebacks = [structlog.processors.format_exc_info] if log_format == "json" else []
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tracebacks, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))


class RequestLog:
    """ASGI middleware: an id, timings, a log line, metrics and a span for each request; what nobody caught is a 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(request_id_of(scope), send)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=answer.request_id)
        with tracing.request_span(scope, answer.request_id) as span:
            try:
                await self._app(scope, receive, answer.send)
            except Exception:
                log.exception("request failed")
                if answer.status:
                    raise  # half an answer is out: only closing the connection says that it is not whole
                internal = ApiError("internal", "an error of the service; its log has the request id")
                await error_response(internal)(scope, receive, answer.send)
            finally:
                tracing.end_span(span, answer.status, answer.timings, scope.get("sizes", {}))
                self._note(scope, answer)

    def _note(self, scope: Scope, answer: "_Answer") -> None:
        path = scope["path"]
        seconds = answer.seconds()
        self._metrics.answered(path if path in self._routes else "other", answer.status, seconds)
        times = {name: round(value, 4) for name, value in answer.timings.items() if name != "total"}
        tell = log.debug if path in POLLED else log.info
        tell("request", method=scope["method"], path=path, status=answer.status, seconds=round(seconds, 4), **times)


class _Answer:
    """An answer on its way out: its status, and the headers that all have."""

    def __init__(self, request_id: str, send: Send) -> None:
        self.request_id = request_id
        self.status = 0
        self.timings = timings.begin()
        self._send = send
        self._started = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.timings["total"] = self.seconds()
            headers = MutableHeaders(scope=message)
            headers.update({**HEADERS, "X-Request-Id": self.request_id})
            headers["Server-Timing"] = timings.server_timing(self.timings)
        await self._send(message)


def request_id_of(scope: Scope) -> str:
    """The caller's X-Request-Id if it is harmless in a log and a header, else a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if SAFE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
