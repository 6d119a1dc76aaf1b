"""What both clients share: their options, how a call becomes exchanges with services, and exchanges a result."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import httpx

from logprobd_client.errors import ApiError
from logprobd_client.requests import Call, Options, Part
from logprobd_client.results import Result
from logprobd_client.retries import Endpoints, Exchange
from logprobd_client.wire import Message, decode, encode, read_json

API_KEY_VARIABLE = "LOGPROBD_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
MAX_REQUEST_TOKENS = 1 << 17
CONNECT_SECONDS = 10.0

Transport = TypeVar("Transport")


class BaseClient(ABC, Generic[Transport]):
    """The options of a client, and everything about a call but the waiting.

    * `base_url`: one address, or those of several services that are alike: requests take turns, and go elsewhere
      where one fails.
    * `api_key`: without it, the environment's LOGPROBD_API_KEY.
    * `timeout`: seconds that an attempt may wait for its answer; connecting may take 10 of them.
    * `retry_for`: seconds after its first failure in which a request is tried again; 0 for never.
    * `expect` (`model`, `weights_version`, `fingerprint`): goes with every call, so that another reference than
      this one is an error.
    * `max_in_flight`, `max_request_tokens`: how many requests of a call are under way, and how large each is.
    * `binary`: False sends JSON also where ids could go in the binary form.
    * `transport`: httpx's, for tests.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retry_for: float = 120.0,
        expect: Mapping[str, Any] | None = None,
        max_in_flight: int = 4,
        max_request_tokens: int = MAX_REQUEST_TOKENS,
        binary: bool = True,
        transport: Transport | None = None,
    ) -> None:
        check_least("timeout", timeout, 0.001)
        check_least("retry_for", retry_for, 0)
        check_least("max_in_flight", max_in_flight, 1)
        check_least("max_request_tokens", max_request_tokens, 1)
        self._endpoints = Endpoints(read_urls(base_url), retry_for)
        self._expect = expect
        self._max_in_flight = max_in_flight
        self._max_request_tokens = max_request_tokens
        self.binary = binary
        self._headers = authorization(api_key)
        # A request that waits for a connection of the pool is not late: its time begins when it has one.
        self._timeout = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None)
        self._connect(transport)

    @abstractmethod
    def _connect(self, transport: Transport | None) -> None:
        """Open what the requests go through."""

    def _options(
        self,
        temperature: float,
        entropy: bool = False,
        top_logprobs: int = 0,
        reduce: str | None = None,
        add_special_tokens: bool = True,
    ) -> Options:
        """A call's options as plain numbers, whatever kind of number they came as."""
        if not math.isfinite(temperature):
            raise ValueError(f"temperature is {temperature}; it must be finite and above 0")
        return Options(
            temperature=float(temperature),
            entropy=bool(entropy),
            top_logprobs=int(top_logprobs),
            reduce=reduce or "none",
            add_special_tokens=bool(add_special_tokens),
            expect=None if self._expect is None else dict(self._expect),
        )

    def _parts(self, call: Call) -> list[Part]:
        return call.parts(self._max_request_tokens, len(self._endpoints.base_urls))

    def _score_part(self, call: Call, part: Part) -> Exchange[Result]:
        message = encode(part, call.options, self.binary and not call.has_text)
        try:
            response = yield from self._endpoints.request(message)
        except ApiError as error:
            error.relocate(lambda text: call.relocate(part, text))
            raise
        return decode(response, part, call.options)

    def _ask_info(self) -> Exchange[dict[str, Any]]:
        return read_json((yield from self._endpoints.request(Message("GET", "/info"))))


def check_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")


def read_urls(base_url: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses without a slash at their end, each once."""
    urls = [base_url] if isinstance(base_url, str) else list(base_url)
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
    if not urls:
        raise ValueError("base_url: expected at least one address, got an empty list")
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


def authorization(api_key: str | None) -> dict[str, str]:
    """The key's header. The variable is the service's own, which may hold several keys: the first is sent."""
    key = os.environ.get(API_KEY_VARIABLE, "").partition(",")[0].strip() if api_key is None else api_key
    return {"Authorization": f"Bearer {key}"} if key else {}
