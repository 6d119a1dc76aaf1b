"""Who may ask: every route needs the key, except those that say whether the service is alive."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from logprobd.errors import ApiError
from logprobd.responses import error_response

KEYLESS = frozenset({"/healthz", "/readyz", "/health"})


class RequireKey:
    """ASGI middleware: refuses what brings none of the keys. Deny by default, by the path that is routed."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys or scope["path"] in KEYLESS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError("unauthorized", "send one of the service's keys as `Authorization: Bearer KEY`")
        await error_response(error)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        """Compares with every key in constant time, so that timing tells nothing about them."""
        header = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, given = header.partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return kind.lower() == b"bearer" and any(matches)
