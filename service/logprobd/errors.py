"""Every error that the service answers with: a closed set of codes, each with its HTTP status."""

STATUS = {
    "malformed": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "model_mismatch": 409,
    "body_too_large": 413,
    "sequence_too_long": 413,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "invalid": 422,
    "overloaded": 429,
    "client_gone": 499,
    "non_finite_logits": 500,
    "worker_crashed": 500,
    "internal": 500,
    "not_ready": 503,
    "draining": 503,
    "out_of_memory": 503,
    "timeout": 504,
}

RETRY_AFTER_SECONDS = {"not_ready": 5, "draining": 5, "out_of_memory": 5}
"""Codes that always say when to come back; `overloaded` computes its own. Never one with status 413."""


MAX_MESSAGE = 500  # characters


class ApiError(Exception):
    """A request that is answered with an error. `param` names the field, as in `groups[0].prompt`."""

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        message = shortened(message)
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = None if param is None else shortened(param)
        self.retry_after = RETRY_AFTER_SECONDS.get(code) if retry_after is None else retry_after

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel from the process that parses large bodies."""
        return _rebuilt, (self.code, self.message, self.param, self.retry_after)

    @property
    def status(self) -> int:
        return STATUS[self.code]

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"code": self.code, "message": self.message, "param": self.param}}


def _rebuilt(code: str, message: str, param: str | None, retry_after: int | None) -> ApiError:
    return ApiError(code, message, param=param, retry_after=retry_after)


def shortened(text: str) -> str:
    """A message that repeats what was sent must not be as long as that: its middle is left out."""
    if len(text) <= MAX_MESSAGE:
        return text
    return f"{text[: MAX_MESSAGE // 2]} ... {text[-MAX_MESSAGE // 2 :]}"


def field_path(parts: tuple[int | str, ...]) -> str:
    """A place in a request's body as people write it: ("groups", 0, "prompt") is `groups[0].prompt`."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
