"""The way of every scoring route: body in, plan, queue, reply out."""

import asyncio
from collections.abc import Callable, Iterable

import structlog
from fastapi import Request
from starlette.responses import Response

from logprobd import timings
from logprobd.dialects.plans import Plan, ServedModel
from logprobd.errors import ApiError
from logprobd.requests import in_time, unless_client_gone
from logprobd.responses import PiecesResponse, moderate
from logprobd.sequences import Outcome
from logprobd.service import Service
from logprobd.waiting import Job

JSON, SAFETENSORS = "application/json", "application/vnd.safetensors"

Reply = Callable[[Plan, list[Outcome], ServedModel], Iterable[bytes]]


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def answer(request: Request, dialect: str, reply: Reply, media_type: str = JSON) -> Response:
    """The reply to a request in a dialect; raises ApiError for whatever keeps it from one."""
    service = service_of(request)
    async with in_time(service.settings.request_timeout):
        plan, job = await read_plan(request, service, dialect)
        note_sizes(request, job)
        try:
            outcomes = await unless_client_gone(request, service.score(job))
        finally:
            timings.note(job)
        pieces = await asyncio.to_thread(written, reply, plan, outcomes, service.served_before)
    return PiecesResponse(pieces, media_type, {})


async def read_plan(request: Request, service: Service, dialect: str) -> tuple[Plan, Job]:
    """The body as a plan; its bytes are gone afterwards."""
    parsing = service.parsing
    async with service.bodies.reading(request) as body:
        return await parsing.plan(dialect, body)


def written(reply: Reply, plan: Plan, outcomes: list[Outcome], served: ServedModel) -> list[bytes]:
    return moderate(reply(plan, outcomes, served))


def note_sizes(request: Request, job: Job) -> None:
    """For the log line and the span: how much was asked, never what."""
    sizes = {"sequences": len(job.sequences), "tokens": job.tokens}
    request.scope["sizes"] = sizes
    structlog.contextvars.bind_contextvars(**sizes)


def require(request: Request, *allowed: str) -> str:
    """The body's media type, which must be one of those; JSON where the client says nothing."""
    given = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if given not in allowed:
        raise ApiError("unsupported_media_type", f"expected Content-Type {' or '.join(allowed)}, got {given!r}")
    return given
