"""The HTTP side: routes, and how a request's body gets in and its reply gets out. Never imports torch."""

import asyncio
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import Response

from logprobd import __version__
from logprobd.auth import RequireKey
from logprobd.dialects import native
from logprobd.errors import ApiError
from logprobd.logs import RequestLog
from logprobd.responses import json_response, on_api_error, on_http_error
from logprobd.schemas import ErrorReply, LogprobsReply, LogprobsRequest
from logprobd.sequences import MAX_TOP_LOGPROBS
from logprobd.service import Service, describe_worker
from logprobd.waiting import Job

T = TypeVar("T")

router = APIRouter()

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 409, 413, 415, 422, 429, 500, 503, 504)
}


def create_app(service: Service) -> FastAPI:
    """The ASGI application over a service, which somebody else runs."""
    app = FastAPI(title="logprobd", version=__version__, redirect_slashes=False, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    # The one added last is the outermost: what is refused for its key is logged too.
    app.add_middleware(RequireKey, keys=service.settings.api_keys)
    app.add_middleware(RequestLog)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign] # FastAPI's own way to extend the document
    return app


def openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the request's schema, which the route reads by itself."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schema = LogprobsRequest.model_json_schema(ref_template="#/components/schemas/{model}")
        document["components"]["schemas"] |= {**schema.pop("$defs"), LogprobsRequest.__name__: schema}
        app.openapi_schema = document
    return app.openapi_schema


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.post(
    "/logprobs",
    responses={200: {"model": LogprobsReply}, **ERRORS},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{LogprobsRequest.__name__}"}}},
        }
    },
)
async def logprobs(request: Request) -> Response:
    """Log-probabilities of given completions after given prompts, one number a token."""
    service = service_of(request)
    served = service.served
    require_json(request)
    body = await read_body(request, service.settings.max_body_bytes)
    plan, job = await asyncio.to_thread(plan_job, body, served)
    structlog.contextvars.bind_contextvars(sequences=len(job.sequences), tokens=job.tokens)
    outcomes = await unless_client_gone(request, service.score(job))
    return Response(await asyncio.to_thread(native.reply, plan, outcomes, served), media_type="application/json")


def plan_job(body: bytes, served: native.ServedModel) -> tuple[native.Plan, Job]:
    plan = native.plan(body, served)
    return plan, Job(plan.sequences)


def require_json(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError("unsupported_media_type", f"expected Content-Type application/json, got {content_type!r}")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, refused before it is read whole if it is larger than allowed."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise body_too_large(int(declared), max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise body_too_large(len(body), max_bytes)
    return bytes(body)


def body_too_large(num_bytes: int, max_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"the body has {num_bytes} bytes or more; the limit is {max_bytes}")


async def unless_client_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as whoever asked for it hangs up."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(hang_up(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError("client_gone", "the client closed the connection")
    finally:
        working.cancel()
        gone.cancel()


async def hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@router.get("/healthz")
async def healthz() -> Response:
    """200 while the process serves."""
    return json_response({"status": "ok"})


@router.get("/health", responses={503: {"model": ErrorReply}})
@router.get("/readyz", responses={503: {"model": ErrorReply}})
async def readyz(request: Request) -> Response:
    """200 when every worker is up and its last batch succeeded."""
    service = service_of(request)
    if service.draining:
        raise ApiError("draining", "the service is stopping")
    if service.ready is None or not service.supervisor.is_ready:
        states = ", ".join(f"{worker.start_message.device}: {worker.state}" for worker in service.supervisor.workers)
        raise ApiError("not_ready", f"workers: {states}")
    return json_response({"status": "ready"})


@router.get("/info", responses={401: {"model": ErrorReply}, 503: {"model": ErrorReply}})
async def info(request: Request) -> Response:
    """The served model, how it is computed, and every limit."""
    service = service_of(request)
    served, ready, settings = service.served, service.ready, service.settings
    assert ready is not None, "a served model has been loaded. This is a bug."
    model = {
        **native.identity(ready.model),
        "path": ready.model.path,
        "family": ready.model.family,
        "max_positions": ready.model.max_positions,
    }
    limits = {
        "max_sequence_tokens": served.max_sequence_tokens,
        "max_batch_tokens": service.max_batch_tokens(ready),
        "max_queued_tokens": settings.max_queued_tokens,
        "max_body_bytes": settings.max_body_bytes,
        "max_top_logprobs": min(MAX_TOP_LOGPROBS, ready.model.vocab_size),
        "request_timeout": settings.request_timeout,
        "vocab_size": ready.model.vocab_size,
    }
    return json_response(
        {
            "model": model,
            "layout": ready.selftest.layout,
            "selftest": asdict(ready.selftest),
            "limits": limits,
            "memory": asdict(ready.memory),
            "queue": service.queue,
            "workers": [describe_worker(worker) for worker in service.supervisor.workers],
            "versions": {"logprobd": __version__, **ready.versions},
        }
    )
