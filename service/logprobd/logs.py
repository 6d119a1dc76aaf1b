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

from logprobd.errors import ApiError
from logprobd.responses import error_response

SAFE_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")

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


class RequestLog:
    """ASGI middleware: gives each request an id and a log line, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, status, started = request_id_of(scope), 0, time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            log.exception("request failed")
            if status:
                raise  # half an answer is out: only closing the connection says that it is not whole
            internal = ApiError("internal", "an error of the service; its log has the request id")
            await error_response(internal)(scope, receive, send_with_id)
        finally:
            seconds = round(time.perf_counter() - started, 4)
            log.info("request", method=scope["method"], path=scope["path"], status=status, seconds=seconds)


def request_id_of(scope: Scope) -> str:
    """The caller's X-Request-Id if it is harmless in a log and a header, else a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if SAFE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
