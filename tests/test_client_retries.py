"""When the client tries again and where, by a clock of the test's own; and the real one where a real service fails."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest

from echo import Echo
from logprobd_client import (
    ApiError,
    AsyncClient,
    Client,
    ConnectionFailedError,
    InvalidRequestError,
    LogprobdError,
    ModelMismatchError,
    NotAllowedError,
    TooLargeError,
    UnavailableError,
)
from logprobd_client.errors import retry_after_seconds
from logprobd_client.retries import LONGEST_BACK_OFF_SECONDS, Endpoints, Outcome, Send
from logprobd_client.wire import Message
from running import WIRES, Running, free_port, running_service

ASK = Message("POST", "/logprobs")
REFUSED = httpx.ConnectError("refused")
LATE = httpx.ReadTimeout("late")


def answer(status: int, retry_after: str | None = None) -> httpx.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return httpx.Response(status, json={"error": {"code": "c", "message": "m", "param": None}}, headers=headers)


@dataclass
class Play:
    """Drives requests by a clock that only waits and slow attempts move. `sent` holds when and where each went."""

    urls: list[str]
    answers: Callable[[str], Outcome]
    retry_for: float = 120.0
    jitter: Callable[[], float] = lambda: 1.0
    attempt_seconds: float = 0.0
    now: float = 1000.0
    sent: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.endpoints = Endpoints(self.urls, self.retry_for, clock=lambda: self.now, jitter=self.jitter)

    def request(self) -> httpx.Response:
        exchange, outcome, started = self.endpoints.request(ASK), None, self.now
        self.sent = []
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                response: httpx.Response = end.value
                return response
            if isinstance(step, Send):
                assert step.message is ASK
                self.sent.append((self.now - started, step.base_url))
                self.now += self.attempt_seconds
                outcome = self.answers(step.base_url)
            else:
                assert step.seconds > 0
                self.now += step.seconds
                outcome = None

    @property
    def moments(self) -> list[float]:
        return [moment for moment, _url in self.sent]

    @property
    def places(self) -> str:
        return "".join(url for _moment, url in self.sent)


def in_turn(*outcomes: Outcome) -> Callable[[str], Outcome]:
    left: Iterator[Outcome] = iter(outcomes)
    return lambda _url: next(left)


@pytest.mark.parametrize("passing", [REFUSED, LATE, *map(answer, (429, 502, 503, 504))])
def test_what_may_pass_is_tried_again(passing: Outcome) -> None:
    play = Play(["a"], in_turn(passing, passing, answer(200)))

    assert play.request().status_code == 200
    assert play.moments == [0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("final", "kind"),
    [
        (answer(400), InvalidRequestError),
        (answer(401), NotAllowedError),
        (answer(403), NotAllowedError),
        (answer(404), ApiError),
        (answer(409), ModelMismatchError),
        (answer(413), TooLargeError),
        (answer(422, "1"), InvalidRequestError),
        (answer(500), ApiError),
        (httpx.LocalProtocolError("illegal header"), ConnectionFailedError),
        (httpx.DecodingError("not gzip"), ConnectionFailedError),
    ],
)
def test_what_stays_is_raised_at_once(final: Outcome, kind: type[LogprobdError]) -> None:
    play = Play(["a", "b"], in_turn(final))

    with pytest.raises(kind):
        play.request()
    assert len(play.sent) == 1


def test_back_off_doubles_up_to_a_bound_and_ends_in_time() -> None:
    play = Play(["a"], lambda _url: REFUSED, retry_for=60)

    with pytest.raises(ConnectionFailedError, match="a: ConnectError: refused") as gone:
        play.request()
    assert play.moments[:6] == [0, 0.5, 1.5, 3.5, 7.5, 15.5]
    assert play.moments[6] - play.moments[5] == LONGEST_BACK_OFF_SECONDS
    assert 45 < play.moments[-1] < 60
    assert gone.value.__notes__ == [f"after {len(play.sent)} attempts; retry_for is 60 s"]


def test_jitter_spreads_those_that_failed_together() -> None:
    generator = random.Random(0)
    seconds = []
    for _ in range(100):
        play = Play(["a"], in_turn(REFUSED, answer(200)), jitter=generator.random)
        play.request()
        seconds.append(play.moments[1])

    assert 0.25 <= min(seconds) < 0.3
    assert 0.45 < max(seconds) <= 0.5


def test_retry_after_is_honoured() -> None:
    play = Play(["a"], in_turn(answer(429, "7"), answer(503, "0"), answer(200)))
    play.request()

    assert play.moments == [0, 7, 8]  # told to come back at once, it backs off all the same


def test_retry_after_beyond_the_time_is_not_waited_for() -> None:
    play = Play(["a"], in_turn(answer(429, "121")))

    with pytest.raises(UnavailableError) as refusal:
        play.request()
    assert refusal.value.retry_after == 121
    assert play.now == 1000


def test_without_time_the_first_failure_is_raised() -> None:
    play = Play(["a", "b"], lambda _url: REFUSED, retry_for=0)

    with pytest.raises(ConnectionFailedError):
        play.request()
    assert len(play.sent) == 1


def test_time_counts_from_the_first_failure_not_from_the_start() -> None:
    play = Play(["a"], in_turn(REFUSED, answer(200)), retry_for=10, attempt_seconds=500)

    assert play.request().status_code == 200


def test_slow_failures_do_not_add_up() -> None:
    play = Play(["a", "b", "c"], lambda _url: LATE, attempt_seconds=600)

    with pytest.raises(ConnectionFailedError):
        play.request()
    assert play.places == "ab"


def test_requests_take_turns() -> None:
    play = Play(["a", "b", "c"], lambda _url: answer(200))
    places = []
    for _ in range(6):
        play.request()
        places.append(play.places)

    assert places == ["a", "b", "c", "a", "b", "c"]


def test_others_are_tried_at_once_before_anything_waits() -> None:
    play = Play(["a", "b", "c"], lambda url: answer(200) if url == "c" else REFUSED if url == "a" else answer(503, "5"))

    assert play.request().status_code == 200
    assert play.sent == [(0, "a"), (0, "b"), (0, "c")]


def test_each_service_rests_as_long_as_it_asks() -> None:
    failing = Counter(a=2, b=1)

    def outcome(url: str) -> Outcome:
        failing[url] -= 1
        if failing[url] < 0:
            return answer(200)
        return answer(503, "30") if url == "b" else REFUSED

    play = Play(["a", "b"], outcome)
    play.request()

    assert play.sent == [(0, "a"), (0, "b"), (0.5, "a"), (1.5, "a")]


def test_a_service_that_failed_comes_last_for_a_while() -> None:
    down = {"a"}
    play = Play(["a", "b"], lambda url: REFUSED if url in down else answer(200))
    places = []
    for seconds in (0, 0, 0, 1, 0):
        play.now += seconds
        play.request()
        places.append(play.places)
    down.clear()
    for _ in range(2):
        play.now += 100
        play.request()
        places.append(play.places)

    assert places[:3] == ["ab", "b", "b"]  # the third would be a's turn
    assert places[3:5] == ["b", "ab"]  # a has rested
    assert places[5:] == ["b", "a"]


@pytest.mark.parametrize(("value", "seconds"), [("7", 7), ("0", 0), ("", None), ("soon", None), ("-1", None)])
def test_retry_after_is_a_number(value: str, seconds: float | None) -> None:
    assert retry_after_seconds(value) == seconds


def test_retry_after_may_be_a_date() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    naive = (datetime.now(UTC) + timedelta(seconds=30)).strftime("%a, %d %b %Y %H:%M:%S -0000")
    past = format_datetime(datetime.now(UTC) - timedelta(seconds=30), usegmt=True)

    for value in (soon, naive):
        seconds = retry_after_seconds(value)
        assert seconds is not None
        assert 25 < seconds <= 30
    assert retry_after_seconds(past) == 0


@pytest.mark.parametrize("binary", [True, False])
def test_both_clients_wait_and_try_again(binary: bool) -> None:
    echo = Echo()
    outcomes: list[httpx.Response | httpx.ConnectError] = []

    def flaky(request: httpx.Request) -> httpx.Response:
        if not outcomes:
            return echo(request)
        if isinstance(outcome := outcomes.pop(0), httpx.ConnectError):
            raise outcome
        return outcome

    async def score() -> list[float]:
        async with AsyncClient(["http://one", "http://two"], transport=transport, binary=binary) as client:
            logprobs: list[float] = (await client.score([[1]], [[8]])).logprobs[0].tolist()
            return logprobs

    transport = httpx.MockTransport(flaky)
    outcomes[:] = [answer(503, "0"), REFUSED, answer(429, "1")]
    with Client(["http://one", "http://two"], transport=transport, binary=binary) as client:
        assert client.score([[1]], [[8]]).logprobs[0].tolist() == [-1]
    assert not outcomes
    outcomes[:] = [answer(503, "0"), REFUSED, answer(429, "1")]
    assert asyncio.run(score()) == [-1]
    assert not outcomes


def test_an_error_does_not_wait_for_those_that_would_try_again() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        return answer(503, "60") if b"999" in request.content else answer(422)

    client = Client(transport=httpx.MockTransport(fail), binary=False, max_request_tokens=2)
    started = time.monotonic()
    with pytest.raises(InvalidRequestError):
        client.score([[1], [2]], [[999], [8]])
    assert time.monotonic() - started < 30


def test_calls_go_on_where_a_service_is_gone(tiny_service: Running) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    prompts, completions = [[number] for number in range(1, 5)], [[[5, 6], [7]]] * 4
    with Client(tiny_service.url, binary=WIRES[0]) as alone:
        expected = alone.score(prompts, completions)
    with Client([gone, tiny_service.url], binary=WIRES[0], max_request_tokens=4, retry_for=10) as client:
        result = client.score(prompts, completions)
        assert client.info()["model"]["fingerprint"] == result.model["fingerprint"]

    for group, other in zip(result.logprobs, expected.logprobs, strict=True):
        for array, wanted in zip(group, other, strict=True):
            assert array == pytest.approx(wanted, abs=1e-5)


def test_a_call_outlasts_a_restart_and_brings_its_key(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, model = free_port(), ("--model", str(tiny_folder))
    monkeypatch.setenv("LOGPROBD_API_KEY", "right")
    with Client(f"http://127.0.0.1:{port}", binary=WIRES[0]) as client:
        with running_service(tmp_path / "first", *model, port=port, LOGPROBD_API_KEY="right") as running:
            before = client.score([[1]], [[2, 3]])
            with Client(running.url, api_key="wrong") as stranger, pytest.raises(NotAllowedError, match="unauthorized"):
                stranger.info()
            running.stop()
        # Refuses connections at first, then is not ready.
        with running_service(tmp_path / "second", *model, port=port, ready=False, LOGPROBD_API_KEY="right"):
            after = client.score([[1]], [[2, 3]])

    assert before.logprobs[0].tolist() == after.logprobs[0].tolist()
