"""What can go wrong, one class for each thing that a caller treats differently.

LogprobdError
├── ConnectionFailedError     no answer came
└── ApiError                  the service answered with an error
    ├── InvalidRequestError   400, 415, 422: the request is wrong and stays so
    ├── ModelMismatchError    409: another model than `expect` is served
    ├── TooLargeError         413: send less at a time
    └── UnavailableError      429, 503, 504: later it may work; `retry_after` says when
"""

from typing import Any


class LogprobdError(Exception):
    """Anything that a client raises on purpose."""


class ConnectionFailedError(LogprobdError):
    """The service could not be reached, or hung up before it answered."""


class ApiError(LogprobdError):
    """An error that the service answered with."""

    def __init__(
        self, message: str, *, status: int, code: str, param: str | None, retry_after: float | None, request_id: str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.request_id = request_id


class InvalidRequestError(ApiError):
    """The request is wrong, and `param` says where."""


class ModelMismatchError(ApiError):
    """The service serves another model than the caller expects."""


class TooLargeError(ApiError):
    """The request is over a limit that the message names."""


class UnavailableError(ApiError):
    """The service is full, starting, stopping or out of time: the same request may succeed later."""


_BY_STATUS = {
    400: InvalidRequestError,
    409: ModelMismatchError,
    413: TooLargeError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


def error_of(status: int, body: Any, retry_after: str | None, request_id: str) -> ApiError:
    """The exception for an error reply; a body that is not ours (a proxy's, say) is shown as it is."""
    detail = body.get("error") if isinstance(body, dict) else None
    detail = detail if isinstance(detail, dict) else {"message": str(body)[:500]}
    kind = _BY_STATUS.get(status, ApiError)
    return kind(
        f"{status} {detail.get('code', '')}: {detail.get('message', '')}",
        status=status,
        code=str(detail.get("code", "")),
        param=detail.get("param"),
        retry_after=float(retry_after) if retry_after and retry_after.isdecimal() else None,
        request_id=request_id,
    )
