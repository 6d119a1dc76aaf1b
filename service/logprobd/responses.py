"""Answers in the form that every route shares."""

import orjson
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from logprobd.errors import ApiError


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error's body, status and, where it may be tried again, Retry-After."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.body, error.status, headers)


async def on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router raises by itself: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = error_response(ApiError("method_not_allowed", f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return error_response(ApiError("not_found", "there is no such route; /docs lists those that there are"))
