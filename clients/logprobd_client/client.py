"""The clients: prompts and completions in, numpy arrays out, nested as they were sent.

Both do the same things in the same order, which `base` says; one waits with threads, the other with tasks.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from logprobd_client.arguments import Text, read_call
from logprobd_client.base import BaseClient
from logprobd_client.padded import read_rows
from logprobd_client.progress import progress_bar
from logprobd_client.requests import Call, Part
from logprobd_client.results import PaddedResult, Result, join
from logprobd_client.retries import Exchange, Outcome, Send, Wait

T = TypeVar("T")


class Client(BaseClient[httpx.BaseTransport]):
    """A client that blocks. It may be shared between threads.

        with Client("http://127.0.0.1:8000") as client:
            result = client.score(["The capital of France is"], [[" Paris.", " Lyon."]])
            print(result.logprobs[0][0].sum())

    Its options are those of `BaseClient`. Raises the errors of `logprobd_client.errors`, and ValueError for
    arguments that make no sense.
    """

    def _connect(self, transport: httpx.BaseTransport | None) -> None:
        self._http = httpx.Client(headers=self._headers, timeout=self._timeout, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def info(self) -> dict[str, Any]:
        """What the service serves, and its limits; of several services, one's."""
        return self._drive(self._ask_info(), threading.Event())

    def score(
        self,
        prompts: Iterable[Text],
        completions: Iterable[Any],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_logprobs: int = 0,
        candidate_ids: Any = None,
        reduce: str | None = None,
        add_special_tokens: bool = True,
        progress: bool = False,
    ) -> Result:
        """Logprobs of completions, of which there is one a prompt, or a list a prompt.

        Logits are divided by `temperature` before they are normalized. Also, where asked: the `entropy` (nats) of
        each position's distribution, its `top_logprobs` likeliest tokens, and the logprobs of `candidate_ids`, which
        nest like the completions with an array (tokens, width) or a list of lists for each. `reduce="sum"` gives one
        number a completion. `add_special_tokens` is about prompts given as text. `progress` shows a bar.
        """
        options = self._options(temperature, entropy, top_logprobs, reduce, add_special_tokens)
        return self._score(read_call(prompts, completions, candidate_ids, options), progress)

    def score_padded(
        self,
        prompt_ids: Iterable[Any],
        completion_ids: Iterable[Any],
        completion_mask: Any = None,
        *,
        prompt_mask: Any = None,
        temperature: float = 1.0,
        entropy: bool = False,
        progress: bool = False,
    ) -> PaddedResult:
        """Logprobs of rows as trainers hold them: arrays (rows, longest) that are 0.0 where `completion_mask` is 0.

        Ids are padded arrays or ragged lists, one row a completion. What the completion mask leaves out before its
        last 1 is context and is not answered; a row without a 1 is not sent. `prompt_mask` tells tokens of padded
        prompts from padding, on whichever side it is. Without a mask, every id is a token.
        """
        rows = read_rows(prompt_ids, completion_ids, completion_mask, prompt_mask)
        return rows.fill(self._score(rows.call(self._options(temperature, entropy)), progress))

    def _score(self, call: Call, progress: bool) -> Result:
        """All parts of a call, some of them at a time, and their answers as one. The first error ends it."""
        parts = self._parts(call)
        with progress_bar(call.num_completions, progress) as advance:
            if len(parts) > 1 and self._max_in_flight > 1:
                return join(self._score_in_threads(call, parts, advance), call)
            results = []
            for part in parts:
                results.append(self._drive(self._score_part(call, part), threading.Event()))
                advance(len(part.completions))
            return join(results, call)

    def _score_in_threads(self, call: Call, parts: list[Part], advance: Callable[[int], object]) -> list[Result]:
        stop, pool = threading.Event(), ThreadPoolExecutor(min(self._max_in_flight, len(parts)))
        try:
            futures = {pool.submit(self._drive, self._score_part(call, part), stop): part for part in parts}
            for future in as_completed(futures):
                future.result()
                advance(len(futures[future].completions))
            return [future.result() for future in futures]
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)  # what is under way ends by itself, unheard

    def _drive(self, exchange: Exchange[T], stop: threading.Event) -> T:
        """Do what an exchange says until it has a result; nothing new once `stop` is set."""
        outcome: Outcome = None
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            wait = step.seconds if isinstance(step, Wait) else 0.0
            if stop.wait(wait):
                raise CancelledError
            outcome = self._send(step) if isinstance(step, Send) else None

    def _send(self, step: Send) -> httpx.Response | httpx.RequestError:
        message = step.message
        try:
            return self._http.request(
                message.method, step.base_url + message.path, content=message.content, headers=message.headers
            )
        except httpx.RequestError as error:
            return error


class AsyncClient(BaseClient[httpx.AsyncBaseTransport]):
    """A client for asyncio; its options and calls are those of `Client`, to be awaited.

        async with AsyncClient("http://127.0.0.1:8000") as client:
            result = await client.score(["The capital of France is"], [[" Paris.", " Lyon."]])

    What it encodes and decodes between waits is one part of a call at a time.
    """

    def _connect(self, transport: httpx.AsyncBaseTransport | None) -> None:
        self._http = httpx.AsyncClient(headers=self._headers, timeout=self._timeout, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """What the service serves, and its limits; of several services, one's."""
        return await self._drive(self._ask_info())

    async def score(
        self,
        prompts: Iterable[Text],
        completions: Iterable[Any],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        top_logprobs: int = 0,
        candidate_ids: Any = None,
        reduce: str | None = None,
        add_special_tokens: bool = True,
        progress: bool = False,
    ) -> Result:
        """As `Client.score`."""
        options = self._options(temperature, entropy, top_logprobs, reduce, add_special_tokens)
        return await self._score(read_call(prompts, completions, candidate_ids, options), progress)

    async def score_padded(
        self,
        prompt_ids: Iterable[Any],
        completion_ids: Iterable[Any],
        completion_mask: Any = None,
        *,
        prompt_mask: Any = None,
        temperature: float = 1.0,
        entropy: bool = False,
        progress: bool = False,
    ) -> PaddedResult:
        """As `Client.score_padded`."""
        rows = read_rows(prompt_ids, completion_ids, completion_mask, prompt_mask)
        return rows.fill(await self._score(rows.call(self._options(temperature, entropy)), progress))

    async def _score(self, call: Call, progress: bool) -> Result:
        """All parts of a call, some of them at a time, and their answers as one. The first error ends it."""
        turns = asyncio.Semaphore(self._max_in_flight)
        with progress_bar(call.num_completions, progress) as advance:

            async def score_part(part: Part) -> Result:
                async with turns:
                    result = await self._drive(self._score_part(call, part))
                advance(len(part.completions))
                return result

            tasks = [asyncio.create_task(score_part(part)) for part in self._parts(call)]
            try:
                return join(await asyncio.gather(*tasks), call)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)  # none outlives the call

    async def _drive(self, exchange: Exchange[T]) -> T:
        """Do what an exchange says until it has a result."""
        outcome: Outcome = None
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            if isinstance(step, Send):
                outcome = await self._send(step)
            else:
                await asyncio.sleep(step.seconds)
                outcome = None

    async def _send(self, step: Send) -> httpx.Response | httpx.RequestError:
        message = step.message
        try:
            return await self._http.request(
                message.method, step.base_url + message.path, content=message.content, headers=message.headers
            )
        except httpx.RequestError as error:
            return error
