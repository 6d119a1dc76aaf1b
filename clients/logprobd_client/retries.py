"""When and where to try again. No I/O and no sleeping: a generator says what to do next, and is told how it went.

Each service that failed rests: as long as its Retry-After says, and at least a back-off that doubles. The next
attempt goes to the service that has rested soonest, so that others are tried at once before anything waits.
"""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx

from logprobd_client.errors import ApiError, ConnectionFailedError, LogprobdError, error_of
from logprobd_client.wire import Message

T = TypeVar("T")

PASSING = frozenset({429, 502, 503, 504})
"""Statuses after which the same request may succeed. Scoring changes nothing, so that trying again is safe."""

FIRST_BACK_OFF_SECONDS, LONGEST_BACK_OFF_SECONDS = 0.5, 10.0


@dataclass(frozen=True, slots=True)
class Send:
    """Send this there, and say what came of it."""

    base_url: str
    message: Message


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait so long."""

    seconds: float


Outcome = httpx.Response | httpx.RequestError | None
"""What a Send has led to; None after a Wait."""

Exchange = Generator[Send | Wait, Outcome, T]


@dataclass
class Endpoints:
    """The services that score for one client, all alike. Requests take turns in where they go first.

    `retry_for`: every attempt begins within so many seconds after a request's first failure; with 0, that is raised.
    """

    base_urls: Sequence[str]
    retry_for: float
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    _turns: "itertools.count[int]" = field(default_factory=itertools.count)
    _rests_until: dict[str, float] = field(default_factory=dict)

    def request(self, message: Message) -> Exchange[httpx.Response]:
        """An answer of status 200, from whichever service gives it; raises what is final, or has lasted too long."""
        ready_at = dict.fromkeys(self._order(), self.clock())
        failures: Counter[str] = Counter()
        deadline: float | None = None
        while True:
            url = min(ready_at, key=ready_at.__getitem__)
            if (seconds := ready_at[url] - self.clock()) > 0:
                yield Wait(seconds)
            outcome = yield Send(url, message)
            if isinstance(outcome, httpx.Response) and outcome.status_code == 200:
                self._rests_until.pop(url, None)
                return outcome
            error = error_from(url, outcome)
            if not may_pass(outcome):
                raise error
            failures[url] += 1
            ready_at[url] = self._rests_until[url] = self.clock() + self._rest(error, failures[url])
            deadline = self.clock() + self.retry_for if deadline is None else deadline
            if max(self.clock(), min(ready_at.values())) >= deadline:
                error.add_note(f"after {failures.total()} attempts; retry_for is {self.retry_for:g} s")
                raise error

    def _order(self) -> list[str]:
        """Each in turn comes first; those that failed a moment ago, for whomever, come last."""
        turn, now = next(self._turns) % len(self.base_urls), self.clock()
        urls = [*self.base_urls[turn:], *self.base_urls[:turn]]
        return sorted(urls, key=lambda url: self._rests_until.get(url, now) > now)

    def _rest(self, error: LogprobdError, failures: int) -> float:
        """Seconds, with jitter so that clients that failed together do not come back together."""
        longest = min(FIRST_BACK_OFF_SECONDS * 2.0 ** (failures - 1), LONGEST_BACK_OFF_SECONDS)
        asked = error.retry_after if isinstance(error, ApiError) else None
        return max(asked or 0.0, longest * (0.5 + self.jitter() / 2))


def may_pass(outcome: Outcome) -> bool:
    """Whether the same request may fare better later."""
    if isinstance(outcome, httpx.Response):
        return outcome.status_code in PASSING
    return isinstance(outcome, httpx.TransportError) and not isinstance(
        outcome, httpx.UnsupportedProtocol | httpx.LocalProtocolError
    )


def error_from(url: str, outcome: Outcome) -> LogprobdError:
    if isinstance(outcome, httpx.Response):
        return error_of(outcome)
    return ConnectionFailedError(f"{url}: {type(outcome).__name__}: {outcome}")
