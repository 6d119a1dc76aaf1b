"""How a body gets in: within its size, its time and the memory for all bodies, while its client is there."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from logprobd.errors import ApiError

T = TypeVar("T")

BODIES_AT_A_TIME = 4  # of the largest size allowed


class BodyBudget:
    """Bounds the bytes of all bodies that are being read or parsed."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self._max_bytes = BODIES_AT_A_TIME * max_body_bytes
        self._used = 0

    @asynccontextmanager
    async def reading(self, request: Request) -> AsyncIterator[bytes]:
        """The body, refused before it is read whole if it is larger than allowed."""
        taken = 0
        try:
            body = bytearray()
            if declared := declared_bytes(request):
                self._check(declared)
                taken = self._take(declared)
            async for chunk in request.stream():
                body += chunk
                self._check(len(body))
                if len(body) > taken:
                    taken += self._take(len(body) - taken)
            yield bytes(body)
        finally:
            self._used -= taken

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self.max_body_bytes:
            raise ApiError(
                "body_too_large", f"the body has {num_bytes} bytes or more; the limit is {self.max_body_bytes}"
            )

    def _take(self, num_bytes: int) -> int:
        if self._used + num_bytes > self._max_bytes:
            raise ApiError(
                "overloaded",
                f"bodies of {self._used} bytes are being read; the limit is {self._max_bytes}",
                retry_after=1,
            )
        self._used += num_bytes
        return num_bytes


def declared_bytes(request: Request) -> int:
    """What Content-Length says; 0 where there is none (the parser of HTTP refuses what is no number)."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() and len(declared) < 20 else 0


@asynccontextmanager
async def in_time(seconds: float) -> AsyncIterator[None]:
    """Answers 504 once a request has taken so long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise ApiError("timeout", f"the request was not answered within {seconds:g} seconds") from None


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
        gone.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})  # its place in the queue is free before the request counts as answered


async def hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
