"""Client of logprobd: per-token log-probabilities from a remote reference model, without torch."""

from logprobd_client.client import AsyncClient, Client
from logprobd_client.errors import (
    ApiError,
    BadReplyError,
    ConnectionFailedError,
    InvalidRequestError,
    LogprobdError,
    ModelMismatchError,
    NotAllowedError,
    ScoringFailedError,
    TooLargeError,
    UnavailableError,
)
from logprobd_client.results import PaddedResult, Result

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "AsyncClient",
    "BadReplyError",
    "Client",
    "ConnectionFailedError",
    "InvalidRequestError",
    "LogprobdError",
    "ModelMismatchError",
    "NotAllowedError",
    "PaddedResult",
    "Result",
    "ScoringFailedError",
    "TooLargeError",
    "UnavailableError",
    "__version__",
]
