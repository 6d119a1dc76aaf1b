"""Waiting for the service: beside other work, for a bounded time, and with a failure told to every rank."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import gather_object

from logprobd_client.errors import LogprobdError

Answer = TypeVar("Answer")


class ReferenceFailedError(LogprobdError):
    """At least one rank got an error from the reference, or no answer in time; raised on every rank alike."""


def in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Begin work in a daemon thread: a call that hangs does not keep a trainer that gave up from ending."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)

    Thread(target=run, name="logprobd-reference", daemon=True).start()
    return future


def within(seconds: float, answer: Future[Answer], late: str) -> Answer:
    """The answer, or what raised in its place; TimeoutError with the sentence `late` if it is not there in time."""
    try:
        return answer.result(max(0.0, seconds))
    except TimeoutError as error:
        raise TimeoutError(late) from error


def on_all_ranks(work: Callable[[], Answer]) -> Answer:
    """What `work` returns, or ReferenceFailedError on every rank if it raised on any, with each rank's reason.

    A collective call: every rank makes it at the same place. Without it the ranks that got their answer would
    wait at their next collective for the one that raised, until ddp_timeout.
    """
    failure: Exception | None = None
    try:
        answer = work()
    except Exception as error:  # noqa: BLE001 - handed to every rank
        failure = error
    state = PartialState()
    reasons = gather_object([None if failure is None else f"rank {state.process_index}: {failure}"])
    if failed := [reason for reason in reasons if reason is not None]:
        where = f"on {len(failed)} of {state.num_processes} ranks; " if state.num_processes > 1 else ""
        raise ReferenceFailedError(f"the remote reference failed, {where}" + "; ".join(failed)) from failure
    return answer
