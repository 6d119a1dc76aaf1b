"""Parses bodies into plans without holding up the event loop.

Parsing JSON holds Python's lock for as long as it takes, in whatever thread it runs. So a large body is parsed in a
process of its own, and comes back as a few long arrays.
"""

import asyncio

import structlog

from logprobd.dialects.flat import FlatPlan, unflatten
from logprobd.dialects.parsing import PARSERS, ParseFirst, ParseRequest
from logprobd.dialects.plans import Plan, ServedModel
from logprobd.errors import ApiError
from logprobd.messages import TokenizerInfo
from logprobd.own_process import OwnProcess, how_it_ended, spawn
from logprobd.waiting import Job

LARGE_BYTES = 128 << 10  # parsed in about a millisecond

log = structlog.get_logger(__name__)


class Parsing:
    """Bodies to plans: small ones in a thread, large ones in a process that is started when the first one comes."""

    def __init__(self, served: ServedModel, tokenizer: TokenizerInfo) -> None:
        self._served = served
        self._tokenizer = tokenizer
        self._process: OwnProcess | None = None
        self._starting = asyncio.Lock()

    async def plan(self, dialect: str, body: bytes) -> tuple[Plan, Job]:
        """A request ready to be scored; raises ApiError with what is wrong with it."""
        if len(body) <= LARGE_BYTES or dialect == "binary":
            return await asyncio.to_thread(self._plan_here, dialect, body)
        flat = await self._plan_there(ParseRequest(dialect, body))
        return await asyncio.to_thread(take_up, flat)

    def _plan_here(self, dialect: str, body: bytes) -> tuple[Plan, Job]:
        plan = PARSERS[dialect](body, self._served)
        return plan, Job(plan.sequences)

    async def _plan_there(self, request: ParseRequest) -> FlatPlan:
        """In the process; one that died (it may have run out of memory) is replaced, and the body tried once more."""
        for _ in range(2):
            process = await self._running()
            try:
                answer: FlatPlan | ApiError = await process.exchange(request)
            except (EOFError, OSError):
                await self._replace(process)
                continue
            if isinstance(answer, ApiError):
                raise answer
            return answer
        raise ApiError("internal", "the process that parses large bodies died of this one twice")

    async def _running(self) -> OwnProcess:
        async with self._starting:
            if self._process is None:
                process = await spawn("logprobd.body_process")
                await process.exchange(ParseFirst(self._served.without_tokenizer(), self._tokenizer))
                self._process = process
            return self._process

    async def _replace(self, process: OwnProcess) -> None:
        if self._process is process:
            self._process = None
            log.error("the process that parses large bodies ended", **how_it_ended(await process.end()))

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await self._process.end()
            self._process = None


def take_up(flat: FlatPlan) -> tuple[Plan, Job]:
    plan = unflatten(flat)
    return plan, Job(plan.sequences)
