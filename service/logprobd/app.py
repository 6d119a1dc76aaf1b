"""The HTTP side: routes. Never imports torch."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from logprobd import __version__
from logprobd.auth import RequireKey
from logprobd.dialect_routes import REQUESTS
from logprobd.dialect_routes import router as dialects
from logprobd.dialects import binary, native
from logprobd.dialects.plans import identity
from logprobd.errors import ApiError
from logprobd.logs import RequestLog
from logprobd.responses import json_response, on_api_error, on_disconnect, on_http_error
from logprobd.schemas import ErrorReply, LogprobsReply, LogprobsRequest
from logprobd.scoring import JSON, SAFETENSORS, answer, require, service_of
from logprobd.service import Service, describe_worker

router = APIRouter()
admin = APIRouter(prefix="/admin", tags=["admin"])

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 409, 413, 415, 422, 429, 500, 503, 504)
}
SCHEMAS: tuple[Any, ...] = (LogprobsRequest, *REQUESTS)


def create_app(service: Service) -> FastAPI:
    """The ASGI application over a service, which somebody else runs."""
    app = FastAPI(
        title="logprobd",
        version=__version__,
        redirect_slashes=False,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # tracing.py's one span knows more
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(dialects, responses=ERRORS)
    if service.settings.admin_keys:
        app.include_router(admin, responses={**ERRORS, 403: {"model": ErrorReply}})
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    # The one added last is the outermost: what is refused for its key is logged too.
    app.add_middleware(RequireKey, keys=service.settings.api_keys, admin_keys=service.settings.admin_keys)
    paths = frozenset(openapi(app)["paths"]) | {"/docs", "/openapi.json"}
    app.add_middleware(RequestLog, metrics=service.metrics, routes=paths)
    app.openapi = lambda: openapi(app)  # type: ignore[method-assign] # FastAPI's own way to extend the document
    return app


def openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document, and the requests' schemas, which the routes read by themselves."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for schema_of in SCHEMAS:
            schema = schema_of.model_json_schema(ref_template="#/components/schemas/{model}")
            document["components"]["schemas"] |= {**schema.pop("$defs", {}), schema_of.__name__: schema}
        app.openapi_schema = document
    return app.openapi_schema


@router.post(
    "/logprobs",
    responses={200: {"model": LogprobsReply, "content": {SAFETENSORS: {}}}, **ERRORS},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": {"$ref": f"#/components/schemas/{LogprobsRequest.__name__}"}},
                SAFETENSORS: {"schema": {"type": "string", "format": "binary"}},
            },
        }
    },
)
async def logprobs(request: Request) -> Response:
    """Log-probabilities of given completions after given prompts, one number a token."""
    dialect = "binary" if require(request, JSON, SAFETENSORS) == SAFETENSORS else "native"
    if SAFETENSORS in request.headers.get("accept", "").lower():
        return await answer(request, dialect, binary.reply, SAFETENSORS)
    return await answer(request, dialect, native.reply)


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
    if not service.is_ready:
        states = ", ".join(f"{worker.name} is {worker.state}" for worker in service.workers)
        raise ApiError("not_ready", f"workers: {states}")
    return json_response({"status": "ready"})


@router.get("/info", responses={401: {"model": ErrorReply}, 503: {"model": ErrorReply}})
async def info(request: Request) -> Response:
    """The served model, how it is computed, and every limit."""
    service = service_of(request)
    ready = service.ready
    if ready is None:
        raise ApiError("not_ready", "the model is loading")
    model = {
        **identity(ready.model),
        "path": ready.model.path,
        "family": ready.model.family,
        "max_positions": ready.model.max_positions,
    }
    return json_response(
        {
            "model": model,
            "layout": ready.selftest.layout,
            "selftest": asdict(ready.selftest),
            "limits": service.limits,
            "memory": asdict(ready.memory),
            "queue": service.queue,
            "workers": [describe_worker(worker) for worker in service.workers],
            "versions": {"logprobd": __version__, **ready.versions},
        }
    )


@router.get("/metrics", response_class=Response, responses={401: {"model": ErrorReply}})
async def metrics(request: Request) -> Response:
    """Everything that is counted, in Prometheus' text format."""
    return Response(service_of(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@admin.post("/drain")
async def drain(request: Request) -> Response:
    """Stop as on SIGTERM: take nothing new, finish what was accepted, exit."""
    service_of(request).stop_asked.set()
    return json_response({"status": "draining"}, 202)
