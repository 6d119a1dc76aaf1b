"""A service in the place of a reference model: one call a batch, in a thread, bounded in time, one model throughout."""

import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from logprobd_client.client import Client
from logprobd_client.results import Result
from logprobd_client.trl.identity import Identity, ReferenceIdentityCallback
from logprobd_client.trl.waiting import in_thread, within

Service = str | Sequence[str] | Client
"""Where the reference is: a URL, several (of services of the same model), or a client that is set up already."""

Rows = list[list[int]]
"""Token ids, a list a sequence, without padding."""

LONGEST_WAIT = 600.0


@dataclass(frozen=True, slots=True)
class Call:
    """A call under way: what was asked, the answer to come, and until when (time.monotonic()) it may come."""

    prompts: Rows
    completions: Rows
    answer: Future[Result]
    deadline: float


class RemoteReference:
    """What a trainer holds as its reference model. Not an nn.Module: nothing prepares, wraps, moves or saves it.

    `timeout` (seconds) bounds each call, from asking to having the scores, the client's retries included.
    """

    def __init__(self, service: Service, timeout: float, rank: int = 0) -> None:
        self.client = service if isinstance(service, Client) else client_of(service, timeout, rank)
        if self.client is not service:
            weakref.finalize(self, self.client.close)
        self.timeout = timeout
        self.identity = Identity()

    def callback(self) -> ReferenceIdentityCallback:
        """Checks at the start what each reply is checked against later."""
        return ReferenceIdentityCallback(self.client, expect=self.identity, timeout=self.timeout)

    def ask(self, prompts: Rows, completions: Rows, temperature: float = 1.0, reduce: str | None = None) -> Call:
        """Send one completion a prompt, and return at once."""
        answer = in_thread(lambda: self.client.score(prompts, completions, temperature=temperature, reduce=reduce))
        return Call(prompts, completions, answer, time.monotonic() + self.timeout)

    def wait_for(self, call: Call) -> list[Any]:
        """The logprobs of a call: a float32 array a completion, or a float if they were reduced.

        Raises what the client raised, TimeoutError, or ReferenceChangedError.
        """
        late = f"no scores of {len(call.prompts)} sequences within reference_timeout ({self.timeout:g} s)"
        result = within(call.deadline - time.monotonic(), call.answer, late)
        self.identity.check(result.model)
        return result.logprobs


def client_of(urls: str | Sequence[str], timeout: float, rank: int) -> Client:
    """A client that gives up within `timeout` seconds; of several URLs, each rank begins with another."""
    bases: Any = urls
    if not isinstance(urls, str):
        first = rank % len(urls)
        bases = [*urls[first:], *urls[:first]]
    return Client(bases, timeout=timeout, retry_for=timeout)


def timeout_within(wanted: float | None, ddp_timeout: float) -> float:
    """How long to wait for the reference, so that a failure is told before the ranks give each other up."""
    timeout = min(LONGEST_WAIT, ddp_timeout / 3) if wanted is None else wanted
    if not 0 < timeout < ddp_timeout:
        raise ValueError(
            f"reference_timeout is {timeout:g} s; it must be over 0 and under ddp_timeout ({ddp_timeout:g} s): the "
            "ranks that wait for a failed one are told when its time is over, and must still be waiting then"
        )
    return timeout
