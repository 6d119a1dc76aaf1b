"""Client of logprobd: per-token log-probabilities from a remote reference model, without torch."""

from logprobd_client.client import Client, Result
from logprobd_client.errors import (
    ApiError,
    ConnectionFailedError,
    InvalidRequestError,
    LogprobdError,
    ModelMismatchError,
    TooLargeError,
    UnavailableError,
)

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "Client",
    "ConnectionFailedError",
    "InvalidRequestError",
    "LogprobdError",
    "ModelMismatchError",
    "Result",
    "TooLargeError",
    "UnavailableError",
    "__version__",
]
