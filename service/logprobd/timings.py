"""What a request's time went to, for the Server-Timing header and the log: queue, forward, total, in seconds."""

from contextvars import ContextVar

from logprobd.waiting import Job

_timings: ContextVar[dict[str, float]] = ContextVar("timings")


def begin() -> dict[str, float]:
    """Start a request's timings; whatever notes something later in its task finds them."""
    timings: dict[str, float] = {}
    _timings.set(timings)
    return timings


def note(job: Job) -> None:
    """Take a job's waiting and running into the current request's timings."""
    timings = _timings.get({})
    started = job.started_at or job.answered_at
    timings["queue"] = started - job.admitted_at
    timings["forward"] = job.answered_at - started


def server_timing(timings: dict[str, float]) -> str:
    """The header's value; its unit is the millisecond."""
    return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in timings.items())
