"""Scores through a running service (--url). The only home of httpx, and loaded only there (the extra `remote`)."""

import asyncio
import itertools
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import fields
from typing import Any

import httpx
import orjson
import structlog

from logprobd.dialects.plans import ServedModel
from logprobd.errors import ApiError
from logprobd.messages import ModelInfo
from logprobd.offline.batches import Answer, Batch, Piece, Scored, failed, request_of
from logprobd.offline.failures import RefusedError, StoppedError
from logprobd.offline.rows import ERROR_COLUMN, Columns, Row, weight_of
from logprobd.offline.settings import ScoreSettings

REQUESTS_IN_FLIGHT = 4
BUSY = frozenset({429, 502, 503, 504})  # worth another try, unless the answer blames a row
LONGEST_WAIT_SECONDS = 30.0
GROUP = re.compile(r"groups\[(\d+)\]\.(?:completions\[(\d+)\])?")

log = structlog.get_logger(__name__)


class RefusalError(Exception):
    """An answer that is an error; `param` is the field of the request that it is about."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param


class Remote:
    """A backend that asks a service."""

    lanes = REQUESTS_IN_FLIGHT

    def __init__(
        self, settings: ScoreSettings, columns: Columns, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        assert settings.url is not None, "a service has an address. This is a bug."
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request
        self._settings, self._columns, self._url = settings, columns, settings.url
        key = settings.first_api_key
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._http = httpx.AsyncClient(base_url=settings.url, headers=headers, timeout=None, transport=transport)
        except httpx.InvalidURL as error:
            raise RefusedError(f"--url {settings.url}: {error}") from None
        self._parts = [part for part in columns.added if part != ERROR_COLUMN]
        self._options = request_of(settings).model_dump(exclude_none=True, exclude={"groups"})
        self.plan: dict[str, Any] = {}

    async def keep_alive(self) -> None:
        """Holds the connections."""
        async with self._http:
            await asyncio.Event().wait()

    async def open(self, plan: dict[str, Any] | None) -> ServedModel:
        """Ask what is served; every request then relies on it, so that a changed model is noticed."""
        info = await self._ask(self._http.build_request("GET", "/info", timeout=30.0))
        try:
            model = ModelInfo(**{part.name: info["model"][part.name] for part in fields(ModelInfo)})
            limits = info["limits"]
            served = ServedModel(model, None, limits["max_sequence_tokens"])
            self.plan = plan or {"request_tokens": self._settings.max_batch_tokens or limits["max_batch_tokens"]}
            self._http.timeout = httpx.Timeout(limits["request_timeout"] + 30.0)
        except (KeyError, TypeError) as error:
            raise RefusedError(f"--url {self._url}: /info does not answer as logprobd does: {error!r}") from None
        expected = {"model": model.id, "weights_version": model.weights_version, "fingerprint": model.fingerprint}
        self._options["expect"] = expected
        return served

    def batches(self, rows: Seq[Row]) -> list[Batch]:
        """Requests of about so many tokens; what shares a prompt comes together."""
        by_prompt: OrderedDict[str | bytes, list[Piece]] = OrderedDict()
        for row in rows:
            key = row.prompt if isinstance(row.prompt, str) else row.prompt.tobytes()
            by_prompt.setdefault(key, []).extend(Piece(row, number) for number in range(len(row.group.completions)))
        batches: list[Batch] = []
        pieces: list[Piece] = []
        weight = 0
        for of_prompt in by_prompt.values():
            prompt = weight_of(of_prompt[0].row.prompt) if of_prompt else 0
            weight += prompt
            for piece in of_prompt:
                added = weight_of(piece.row.group.completions[piece.completion])
                if pieces and weight + added > self.plan["request_tokens"]:
                    batches.append(Batch(pieces))
                    pieces, weight = [], prompt
                pieces.append(piece)
                weight += added
        return [*batches, Batch(pieces)] if pieces else batches

    async def score(self, batch: Batch) -> Scored:
        """All answers of a batch, in as many requests as it takes."""
        answers: list[Answer] = []
        tokens, waiting = 0, [batch.pieces]
        while waiting:
            groups = groups_of(waiting.pop())
            try:
                reply = await self._ask(self._http.build_request("POST", "/logprobs", **self._body(groups)))
            except RefusalError as error:
                lost, rest = self._blame(error, groups)
                answers += lost
                waiting += rest
                continue
            answers += self._answers(groups, reply)
            tokens += reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
        return Scored(answers, tokens)

    def _body(self, groups: list[list[Piece]]) -> dict[str, Any]:
        """A request for pieces, a list of them a row."""
        wire = [
            {
                "prompt": pieces[0].row.prompt,
                "completions": [piece.row.group.completions[piece.completion] for piece in pieces],
            }
            for pieces in groups
        ]
        body = orjson.dumps({"groups": wire, **self._options}, option=orjson.OPT_SERIALIZE_NUMPY)
        return {"content": body, "headers": {"Content-Type": "application/json"}}

    def _blame(self, error: RefusalError, groups: list[list[Piece]]) -> tuple[list[Answer], list[list[Piece]]]:
        """Answers for the pieces that an error is about, and what of the others to ask for again."""
        pieces = [piece for group in groups for piece in group]
        if (found := GROUP.match(error.param or "")) is not None:
            group = groups[int(found[1])]
            blamed = group if found[2] is None else [group[int(found[2])]]
            rest = [piece for piece in pieces if piece not in blamed]
            return [self._failed(piece, error) for piece in blamed], [rest] if rest else []
        if error.code not in ("request_too_large", "body_too_large"):
            raise StoppedError(f"{self._url} answered {error.code}: {error.message}")
        if len(pieces) == 1:
            return [self._failed(pieces[0], error)], []
        middle = len(pieces) // 2
        return [], [pieces[middle:], pieces[:middle]]

    def _failed(self, piece: Piece, error: RefusalError) -> Answer:
        """The service's error in the words of the file: it counts groups and completions of its request only."""
        param = error.param or ""
        message = error.message.removeprefix(f"{param}: ")
        within = GROUP.sub(f"completions[{piece.completion}]" if ".completions" in param else "", param, count=1)
        return failed(piece.row, piece.completion, ApiError(error.code, message, param=within), self._columns)

    def _answers(self, groups: list[list[Piece]], reply: dict[str, Any]) -> list[Answer]:
        try:
            return [
                Answer(piece.row.number, piece.completion, {part: given.get(part) for part in self._parts})
                for group, scores in zip(groups, reply["groups"], strict=True)
                for piece, given in zip(group, scores["completions"], strict=True)
            ]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoppedError(f"{self._url} does not answer as logprobd does: {error!r}") from None

    async def _ask(self, request: httpx.Request) -> dict[str, Any]:
        """The JSON of a good answer, asked for again while the service is busy or gone; raises RefusalError."""
        deadline = time.monotonic() + self._settings.retry_timeout
        for attempt in itertools.count():
            wait = min(0.5 * 2**attempt, LONGEST_WAIT_SECONDS)
            try:
                response = await self._http.send(request)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code == 200:
                    return self._json(response)
                refusal = refusal_of(response)
                if refusal.status not in BUSY or refusal.param:
                    raise refusal
                reason, wait = f"{refusal.code}: {refusal.message}", retry_after(response, wait)
            if time.monotonic() + wait > deadline:
                raise StoppedError(f"{self._url}: {reason}; gave up after {self._settings.retry_timeout:g} seconds")
            log.warning("asking again", url=self._url, reason=reason, in_seconds=wait)
            await asyncio.sleep(wait)
        raise AssertionError("the attempts have no end. This is a bug.")

    def _json(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            raise StoppedError(f"{self._url} does not answer as logprobd does: {error}") from None
        if not isinstance(answer, dict):
            raise StoppedError(f"{self._url} does not answer as logprobd does: not a JSON object")
        return answer


def groups_of(pieces: list[Piece]) -> list[list[Piece]]:
    """Pieces that stand together and belong to the same row, as one group of a request."""
    return [list(group) for _row, group in itertools.groupby(pieces, key=lambda piece: piece.row.number)]


def refusal_of(response: httpx.Response) -> RefusalError:
    """An error as the service words it, or as whatever stands in front of it does."""
    try:
        error = orjson.loads(response.content)["error"]
        return RefusalError(response.status_code, str(error["code"]), str(error["message"]), error["param"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return RefusalError(
            response.status_code, f"HTTP {response.status_code}", response.text[:200] or "no reason given"
        )


def retry_after(response: httpx.Response, otherwise: float) -> float:
    """The seconds that an answer asks to wait."""
    given = response.headers.get("retry-after", "")
    return float(given) if given.isdecimal() else otherwise
