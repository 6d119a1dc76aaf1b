"""What can go wrong, one class for each thing that a caller treats differently.

LogprobdError
├── ConnectionFailedError     no answer came
├── BadReplyError             an answer came that a logprobd service does not give
└── ApiError                  the service answered with an error
    ├── InvalidRequestError   400, 415, 422: the request is wrong and stays so
    ├── NotAllowedError       401, 403: the API key is missing or wrong
    ├── ModelMismatchError    409: another model than `expect` is served
    ├── TooLargeError         413: send less at a time
    ├── ScoringFailedError    500: the model cannot score this; the rest of the data may be fine
    └── UnavailableError      429, 502, 503, 504: later it may work; `retry_after` says when

What may pass is tried again first (`retry_for`), so that it is raised only when it lasts.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx


class LogprobdError(Exception):
    """Anything that a client raises on purpose, other than a ValueError for arguments that make no sense."""


class ConnectionFailedError(LogprobdError):
    """The service could not be reached, hung up before it answered, or took longer than the timeout."""


class BadReplyError(LogprobdError):
    """The answer is not one to what was asked: another program listens there, or a proxy has changed it."""


class ApiError(LogprobdError):
    """An error that the service answered with.

    `param` names the field, counted as in the call: `groups[2].completions[0]` is the first completion of
    `prompts[2]`, also where the call was cut into several requests.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        retry_after: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.request_id = request_id

    def relocate(self, relocated: Callable[[str], str]) -> None:
        """Count field paths anew, in the message and in `param`."""
        self.args = (relocated(str(self)),)
        self.param = None if self.param is None else relocated(self.param)


class InvalidRequestError(ApiError):
    """The request is wrong, and `param` says where."""


class NotAllowedError(ApiError):
    """The API key is missing or wrong, or does not open this route."""


class ModelMismatchError(ApiError):
    """The service serves another model than the caller expects, or two services that answered one call differ."""


class TooLargeError(ApiError):
    """The request is over a limit that the message names."""


class ScoringFailedError(ApiError):
    """The service failed on this request, for example because the model gave NaN (`non_finite_logits`)."""


class UnavailableError(ApiError):
    """The service is full, starting, stopping or out of time: the same request may succeed later."""


_BY_STATUS = {
    400: InvalidRequestError,
    401: NotAllowedError,
    403: NotAllowedError,
    409: ModelMismatchError,
    413: TooLargeError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: UnavailableError,
    500: ScoringFailedError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}


def error_of(response: httpx.Response) -> ApiError:
    """The exception for an error reply; a body that is not ours (a proxy's, say) is shown as it is."""
    detail = _detail(response)
    param = detail.get("param")
    return _BY_STATUS.get(response.status_code, ApiError)(
        f"{response.status_code} {detail.get('code', '')}: {detail.get('message', '')}",
        status=response.status_code,
        code=str(detail.get("code", "")),
        param=None if param is None else str(param),
        retry_after=retry_after_seconds(response.headers.get("retry-after", "")),
        request_id=response.headers.get("x-request-id", ""),
    )


def _detail(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {"message": response.text[:500]}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {"message": str(body)[:500]}


def retry_after_seconds(value: str) -> float | None:
    """A Retry-After header, which is a number of seconds or a date; None where it is neither."""
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
