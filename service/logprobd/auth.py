"""Who may ask: every route needs a key, except those that say whether the service is alive; /admin one of its own."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from logprobd.errors import ApiError
from logprobd.responses import error_response

MAX_HEAD_BYTES = 32 << 10  # of an address and headers; the server's own limit lets through what comes at once
KEYLESS = frozenset({"/healthz", "/readyz", "/health"})
ADMIN = "/admin"


class RequireKey:
    """ASGI middleware: refuses what brings no key for what it asks. Deny by default, by the path that is routed."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [key.encode() for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Why the request may not pass; an admin's key opens everything."""
        if (size := head_bytes(scope)) > MAX_HEAD_BYTES:
            return ApiError("malformed", f"address and headers have {size} bytes; the limit is {MAX_HEAD_BYTES}")
        if scope["path"] in KEYLESS:
            return None
        given = bearer_of(scope)
        is_admin, is_user = is_one_of(given, self._admin_keys), is_one_of(given, self._keys)
        if self._admin_keys and in_admin(scope["path"]) and not is_admin:
            if is_user:
                return ApiError("forbidden", "this needs an admin key")
            return ApiError("unauthorized", "send an admin key as `Authorization: Bearer KEY`")
        if self._keys and not is_admin and not is_user:
            return ApiError("unauthorized", "send one of the service's keys as `Authorization: Bearer KEY`")
        return None


def head_bytes(scope: Scope) -> int:
    """What a request sends before its body, about."""
    return len(scope["path"]) + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in scope["headers"])


def in_admin(path: str) -> bool:
    """However it is spelled: what merely looks like an admin's route is refused too."""
    return path.lower().lstrip("/").startswith(ADMIN.lstrip("/"))


def bearer_of(scope: Scope) -> bytes:
    """The key that a request brings; empty if none."""
    header = dict(scope["headers"]).get(b"authorization", b"")
    kind, _, given = header.partition(b" ")
    return given.strip() if kind.lower() == b"bearer" else b""


def is_one_of(given: bytes, keys: list[bytes]) -> bool:
    """Compares with every key in constant time, so that timing tells nothing about them."""
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)
