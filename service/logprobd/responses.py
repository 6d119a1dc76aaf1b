"""Answers in the form that every route shares."""

from collections.abc import Iterable

import orjson
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from logprobd.errors import ApiError

PIECE_BYTES = 1 << 18


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


class PiecesResponse(Response):
    """A body in pieces of moderate size, handed on one by one: nothing copies a large one whole on the event loop."""

    def __init__(self, pieces: list[bytes], media_type: str, headers: dict[str, str]) -> None:
        super().__init__(None, 200, {**headers, "Content-Length": str(sum(map(len, pieces)))}, media_type)
        self._pieces = pieces

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def moderate(pieces: Iterable[bytes]) -> list[bytes]:
    """The same bytes in pieces of about a quarter of a megabyte."""
    merged, waiting = [], bytearray()
    for piece in pieces:
        waiting += piece
        while len(waiting) >= PIECE_BYTES:
            merged.append(bytes(waiting[:PIECE_BYTES]))
            del waiting[:PIECE_BYTES]
    return [*merged, bytes(waiting)]


def error_response(error: ApiError) -> Response:
    """An error's body, status and, where it may be tried again, Retry-After."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.body, error.status, headers)


async def on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_disconnect(_request: Request, error: Exception) -> Response:
    """A client that hung up while its body was read: nobody reads this, but the log and the metrics say 499."""
    assert isinstance(error, ClientDisconnect)
    return error_response(ApiError("client_gone", "the client closed the connection"))


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router raises by itself: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = error_response(ApiError("method_not_allowed", f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return error_response(ApiError("not_found", "there is no such route; /docs lists those that there are"))
