"""How calls become requests and replies become arrays: both forms, against numbers that are made of the ids."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load

from echo import MODEL, Echo
from logprobd_client import (
    AsyncClient,
    BadReplyError,
    Client,
    InvalidRequestError,
    ModelMismatchError,
    Result,
    ScoringFailedError,
)
from logprobd_client.wire_binary import metadata_of, save
from running import run_python

PROMPTS = [[1, 2], [3], [3]]
GROUPS = [[[8, 16], [24]], [], [[], [32, 40, 7]]]


def client_of(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> Client:
    return Client(transport=httpx.MockTransport(handler), retry_for=0, **options)


def plain(value: Any) -> Any:
    """Arrays as lists, at whatever depth."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("max_request_tokens", [1 << 16, 4])
def test_everything_nests_like_the_completions(binary: bool, max_request_tokens: int) -> None:
    echo = Echo()
    client = client_of(echo, binary=binary, max_request_tokens=max_request_tokens)
    candidates = [[[[1], [2, 7]], [[]]], [], [[], np.array([[1, 2], [3, 4], [5, 6]])]]
    result = client.score(PROMPTS, GROUPS, entropy=True, top_logprobs=2, candidate_ids=candidates)

    assert {asked.binary for asked in echo.asked} == {binary}
    assert len(echo.asked) == (1 if max_request_tokens > 4 else 3)
    assert plain(result.logprobs) == [[[-1, -2], [-3]], [], [[], [-4, -5, -np.inf]]]
    assert plain(result.entropy) == [[[0.5, 1], [1.5]], [], [[], [2, 2.5, 7 / 16]]]
    assert plain(result.top_ids) == [[[[0, 1]] * 2, [[0, 1]]], [], [[], [[0, 1]] * 3]]
    assert plain(result.top_logprobs) == [[[[0, -1]] * 2, [[0, -1]]], [], [[], [[0, -1]] * 3]]
    assert result.top_ids is not None
    assert result.top_ids[2][0].shape == (0, 2)
    assert plain(result.candidate_logprobs) == [
        [[[-1 / 8], [-2 / 8, -np.inf]], [[]]],
        [],
        [[], [[-1 / 8, -2 / 8], [-3 / 8, -4 / 8], [-5 / 8, -6 / 8]]],
    ]
    assert result.token_ids is None
    assert {array.dtype for group in result.logprobs for array in group} == {np.dtype(np.float32)}
    assert result.usage["completion_tokens"] == 6
    assert result.model == MODEL


@pytest.mark.parametrize("binary", [True, False])
def test_sums_are_one_number_a_completion(binary: bool) -> None:
    result = client_of(Echo(), binary=binary).score([[1], [1]], [[8, 16], [7]], reduce="sum", temperature=0.5)

    assert result.logprobs == [-3.0, -np.inf]
    assert result.temperature == 0.5


@pytest.mark.parametrize("binary", [True, False])
def test_nothing_to_score_still_names_the_model(binary: bool) -> None:
    client = client_of(Echo(), binary=binary)

    assert client.score([], []).model == MODEL
    assert plain(client.score([[1]], [[[]]]).logprobs) == [[[]]]
    assert client.score([[1]], [[]], entropy=True).logprobs[0].shape == (0,)


def test_options_and_expectations_are_passed_on() -> None:
    echo = Echo()
    client = client_of(echo, expect={"fingerprint": "abc"})
    client.score([[1]], [[8]], temperature=np.float32(0.5), top_logprobs=3, add_special_tokens=False)  # type: ignore[arg-type]

    assert echo.asked[0].options == {
        "temperature": 0.5,
        "entropy": False,
        "top_logprobs": 3,
        "reduce": "none",
        "add_special_tokens": False,
        "expect": {"fingerprint": "abc"},
    }


@pytest.mark.parametrize(
    "completions",
    [
        np.array([[8, 16], [24, 32]], dtype=np.uint16),
        torch.tensor([[8, 16], [24, 32]]),
        [(8, 16), np.array([24, 32], dtype=np.int64)],
        [[np.int64(8), 16], list(torch.tensor([24, 32]))],
    ],
)
@pytest.mark.parametrize("binary", [True, False])
def test_ids_come_as_whatever_holds_integers(completions: Any, binary: bool) -> None:
    result = client_of(Echo(), binary=binary).score([[1], [2]], completions)

    assert plain(result.logprobs) == [[-1, -2], [-3, -4]]
    torch.from_numpy(result.logprobs[0])  # warns of memory that must not be written to


def test_groups_may_be_arrays_as_well() -> None:
    result = client_of(Echo()).score([[1]], torch.tensor([[[8, 16], [24, 32]]]))

    assert plain(result.logprobs) == [[[-1, -2], [-3, -4]]]


def test_text_goes_as_json() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        groups = [{"completions": [{"logprobs": [-1.0, -2.0], "token_ids": [5, 6]}]}]
        return httpx.Response(200, json={"groups": groups, "temperature": 1.0, "model": MODEL, "usage": {}})

    result = client_of(answer).score(["a prompt"], ["ü"])

    assert bodies[0]["groups"] == [{"prompt": "a prompt", "completions": ["ü"]}]
    assert plain(result.token_ids) == [[5, 6]]
    assert plain(result.logprobs) == [[-1, -2]]


def test_repeated_prompts_are_sent_once() -> None:
    echo = Echo()
    result = client_of(echo).score([[1, 2], np.array([1, 2]), [3]], [[8], [16], [24]])

    assert echo.asked[0].prompts == [[1, 2], [3]]
    assert echo.asked[0].completions_per_prompt == [2, 1]
    assert plain(result.logprobs) == [[-1], [-2], [-3]]


def test_large_calls_are_cut_between_groups() -> None:
    echo = Echo()
    prompts = [[number] * 4 for number in range(1, 8)]
    completions = [[[8 * number] * 3, [16]] for number in range(1, 8)]  # groups of 8 tokens
    result = client_of(echo, max_request_tokens=20, max_in_flight=2).score(prompts, completions)

    assert sorted(asked.completions_per_prompt for asked in echo.asked) == [[2], [2, 2], [2, 2], [2, 2]]
    assert [group[0].tolist() for group in result.logprobs] == [[-number] * 3 for number in range(1, 8)]
    assert result.usage == {"prompt_tokens": 28, "completion_tokens": 28, "computed_tokens": 28}


def test_a_group_that_is_too_large_is_cut_and_nests_all_the_same() -> None:
    echo = Echo()
    completions = [[[8 * number, 8] for number in range(6)]]
    result = client_of(echo, max_request_tokens=8, max_in_flight=1).score([[1, 2, 3]], completions)

    assert [asked.completions_per_prompt for asked in echo.asked] == [[2], [2], [2]]  # 3 + 2 + 2 tokens each
    assert plain(result.logprobs) == [[[-number, -1] for number in range(6)]]


def test_a_long_prompt_is_not_computed_for_each_completion() -> None:
    echo = Echo()
    client_of(echo, max_request_tokens=8, max_in_flight=1).score([[1] * 100], [[[8, 8]] * 8])

    assert [asked.completions_per_prompt for asked in echo.asked] == [[4], [4]]


def test_a_call_occupies_all_services() -> None:
    hosts: list[tuple[str, int]] = []
    echo = Echo()

    def answer(request: httpx.Request) -> httpx.Response:
        response = echo(request)
        hosts.append((request.url.host, len(echo.asked[-1].completions)))
        return response

    urls = ["http://one", "http://two/"]
    client = Client(urls, transport=httpx.MockTransport(answer), max_in_flight=1)
    client.score([[number] for number in range(1, 11)], [[8] * 1000] * 10)
    client.score([[1]], [[8]])
    client.score([[1]], [[8]])

    assert hosts == [("one", 5), ("two", 5), ("one", 1), ("two", 1)]


def test_the_library_reads_what_is_written_without_it() -> None:
    ids = [np.arange(length, dtype=np.int32) for length in (0, 3, 5)]
    for options in ("", "ü", '"quotes"', "x" * 7):
        content = save({"one": ids, "none": [], "other": ids[1:2]}, {"options": options})
        tensors = load(content)

        assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
            "one": [0, 1, 2, 0, 1, 2, 3, 4],
            "none": [],
            "other": [0, 1, 2],
        }
        assert metadata_of(content) == {"options": options}
        assert content.index(b"\0\0\0\0\1\0\0\0") % 8 == 0  # aligned


def test_no_more_than_allowed_is_in_flight() -> None:
    echo, lock, ready = Echo(), threading.Lock(), threading.Barrier(3, timeout=30)
    waiting, most = 0, 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal waiting, most
        with lock:
            waiting += 1
            most = max(most, waiting)
        ready.wait()  # goes on once three are here
        with lock:
            waiting -= 1
        return echo(request)

    client = client_of(answer, max_request_tokens=2, max_in_flight=3)
    result = client.score([[number] for number in range(1, 10)], [[8 * number] for number in range(1, 10)])

    assert most == 3
    assert [array[0] for array in result.logprobs] == [-number for number in range(1, 10)]


def test_parts_from_different_models_do_not_mix() -> None:
    echoes = {"one": Echo(), "two": Echo(model={**MODEL, "weights_version": 1})}
    transport = httpx.MockTransport(lambda request: echoes[request.url.host](request))
    client = Client(["http://one", "http://two"], transport=transport, max_request_tokens=2)

    with pytest.raises(ModelMismatchError, match="weights_version 0 and 1") as mismatch:
        client.score([[1], [2]], [[8], [8]])
    assert mismatch.value.param == "expect.weights_version"


@pytest.mark.parametrize(
    ("completions", "param"),
    [
        ([[8], [8], [8], [999]], "groups[3].completions[0][0]"),
        ([[[8]], [[8], [8, 999]]], "groups[1].completions[1][0]"),
    ],
)
def test_errors_count_as_the_call_does(completions: list[Any], param: str) -> None:
    echo = Echo()

    def refuse(request: httpx.Request) -> httpx.Response:
        response = echo(request)
        asked = echo.asked[-1]
        bad = next((number for number, ids in enumerate(asked.completions) if 999 in ids), None)
        if bad is None:
            return response
        group = next(g for g in range(len(asked.prompts)) if sum(asked.completions_per_prompt[: g + 1]) > bad)
        place = f"groups[{group}].completions[{bad - sum(asked.completions_per_prompt[:group])}][0]"
        return httpx.Response(422, json={"error": {"code": "invalid", "message": f"{place}: bad", "param": place}})

    client = client_of(refuse, max_request_tokens=3, max_in_flight=1)
    prompts = [[number // 2 + 1] for number in range(len(completions))]
    with pytest.raises(InvalidRequestError, match="bad") as refusal:
        client.score(prompts, completions)

    assert refusal.value.param == param
    assert param in str(refusal.value)


def test_the_first_error_ends_a_call() -> None:
    asked = []

    def fail(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        error = {"code": "non_finite_logits", "message": "NaN", "param": "groups[0].prompt"}
        return httpx.Response(500, json={"error": error})

    with pytest.raises(ScoringFailedError, match="non_finite_logits: NaN"):
        client_of(fail, max_request_tokens=2, max_in_flight=1).score([[n] for n in range(1, 100)], [[8]] * 99)
    assert len(asked) < 50


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(200, html="<p>Welcome"), "text/html"),
        (httpx.Response(200, json={"hello": 1}), "KeyError"),
        (httpx.Response(200, json=[]), "TypeError"),
        (httpx.Response(200, content=b"oops", headers={"Content-Type": "application/vnd.safetensors"}), "Safetensor"),
        (
            httpx.Response(
                200,
                json={
                    "groups": [{"completions": [{"logprobs": [-1.0]}]}],
                    "temperature": 1.0,
                    "model": MODEL,
                    "usage": {},
                },
            ),
            "1 logprobs for a completion of 2 tokens",
        ),
        (
            httpx.Response(200, json={"groups": [], "temperature": 1.0, "model": MODEL, "usage": {}}),
            "0 answers for 1 completions",
        ),
    ],
)
def test_a_reply_to_something_else_is_not_taken(answer: httpx.Response, message: str) -> None:
    with pytest.raises(BadReplyError, match=message):
        client_of(lambda _request: answer).score([[1]], [[8, 16]])


def test_information_that_is_none_is_not_taken() -> None:
    with pytest.raises(BadReplyError, match="text/plain"):
        client_of(lambda _request: httpx.Response(200, text="ok")).info()
    with pytest.raises(BadReplyError, match="a JSON list"):
        client_of(lambda _request: httpx.Response(200, json=[1])).info()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], []), "1 prompts and 0 completions"),
        (("text", ["more"]), "got text"),
        (([[1.5]], [[1]]), r"prompts\[0\]"),
        (([[1]], [np.array([1.5])]), r"completions\[0\].*float64"),
        (([[1], [2]], [[[1]], [[3], [2**31]]]), r"completions\[1\]\[1\].*2\*\*31"),
        (([[1]], [np.array([2**40])]), r"completions\[0\].*1099511627776"),
        (([[True, False]], [[1]]), r"prompts\[0\].*booleans"),
        (([[1]], [np.array([True])]), r"completions\[0\].*bool"),
        (([[1]], [None]), r"completions\[0\].*object"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client_of(Echo()).score(*arguments)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([], "0 entries for 1 prompts"),
        ([[[[1]], [[2]]]], r"candidate_ids\[0\]: expected 1 entries"),
        ([5], r"candidate_ids\[0\]: expected 1 entries"),
        ([[5]], r"candidate_ids\[0\]\[0\]: expected one list of token ids a token, got 5"),
        ([[[5]]], r"candidate_ids\[0\]\[0\]\[0\]"),
        ([[[[1.5]]]], r"candidate_ids\[0\]\[0\]\[0\]"),
        ([[np.array([1, 2])]], r"candidate_ids\[0\]\[0\].*shape \(2,\)"),
    ],
)
def test_candidates_that_do_not_nest_are_named(candidates: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client_of(Echo()).score([[1]], [[[8]]], candidate_ids=candidates)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_url": "localhost:8000"}, "base_url.*http://HOST:PORT"),
        ({"base_url": []}, "base_url"),
        ({"timeout": 0}, "timeout is 0"),
        ({"retry_for": -1}, "retry_for is -1"),
        ({"max_in_flight": 0}, "max_in_flight is 0"),
        ({"max_request_tokens": 0}, "max_request_tokens is 0"),
    ],
)
def test_options_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Client(**options)


def test_a_temperature_that_json_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature is nan"):
        client_of(Echo()).score([[1]], [[8]], temperature=float("nan"))


def test_the_key_comes_from_the_argument_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    echo = Echo()

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return echo(request)

    client_of(answer).score([[1]], [[8]])
    monkeypatch.setenv("LOGPROBD_API_KEY", "first,second")
    client_of(answer).score([[1]], [[8]])
    client_of(answer, api_key="mine").score([[1]], [[8]])

    assert sent == [None, "Bearer first", "Bearer mine"]


@pytest.mark.parametrize("binary", [True, False])
def test_padded_rows_come_back_padded(binary: bool) -> None:
    echo = Echo()
    mask = np.array([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    completions = np.array([[8, 16, 0, 0], [24, 32, 7, 40], [48, 0, 0, 0], [7, 8, 8, 8]])
    prompts = np.array([[0, 1, 2], [0, 1, 2], [0, 0, 0], [3, 4, 5]])
    result = client_of(echo, binary=binary).score_padded(
        prompts, completions, mask, prompt_mask=prompts > 0, entropy=True, temperature=0.5
    )

    assert echo.asked[0].prompts == [[1, 2], [3, 4, 5]]
    assert [ids.tolist() for ids in echo.asked[0].completions] == [[8, 16], [24, 32, 7, 40], [7, 8, 8, 8]]
    assert result.logprobs.dtype == np.float32
    assert result.logprobs.tolist() == [[-1, -2, 0, 0], [0, -4, 0, -5], [0] * 4, [-np.inf, -1, -1, -1]]
    assert result.entropy is not None
    assert result.entropy[1].tolist() == [0, 2, 0, 2.5]
    assert result.temperature == 0.5
    assert result.model == MODEL


def test_padded_rows_may_be_ragged_and_without_masks() -> None:
    client = client_of(Echo())

    assert client.score_padded([[1], [2]], [[8, 16, 24], [32]]).logprobs.tolist() == [[-1, -2, -3], [-4, 0, 0]]
    assert client.score_padded([[1]], torch.tensor([[8, 16]]), torch.tensor([[True, False]])).logprobs.tolist() == [
        [-1, 0]
    ]
    assert client.score_padded([[1], [2]], [[8], [8]], [[0, 0], [0, 0]]).logprobs.tolist() == [[0, 0], [0, 0]]
    assert client.score_padded([], []).logprobs.shape == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], [[8], [8]], None), "1 rows of prompt_ids and 2 of completion_ids"),
        (([[1]], [[8]], [[1], [1]]), r"completion_mask: expected shape \(1, longest\), got \(2, 1\)"),
        (([[1]], [[8]], [[1, 1]]), r"completion_mask\[0\] has a 1 beyond its 1 ids"),
        (([[1]], [["text"]], None), r"completion_ids\[0\]"),
    ],
)
def test_rows_and_masks_that_do_not_fit_are_named(arguments: tuple[Any, Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        client_of(Echo()).score_padded(*arguments)


def test_an_error_in_padded_rows_names_the_row() -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        error = {"code": "invalid", "message": "bad", "param": "groups[0].completions[1]"}
        return httpx.Response(422, json={"error": error})

    with pytest.raises(InvalidRequestError) as refusal:
        client_of(refuse).score_padded([[1], [1], [1]], [[8], [8], [8]], [[1], [0], [1]])
    assert refusal.value.param == "groups[2].completions[0]"


def test_the_asyncio_client_does_the_same() -> None:
    echo = Echo()

    async def both() -> tuple[Result, Result]:
        async with AsyncClient(transport=httpx.MockTransport(echo), max_request_tokens=4, max_in_flight=2) as client:
            padded = await client.score_padded([[1], [2]], [[8, 16], [24]])
            assert padded.logprobs.tolist() == [[-1, -2], [-3, 0]]
            return await asyncio.gather(client.score(PROMPTS, GROUPS), client.score([[1]], [[8]], entropy=True))

    large, small = asyncio.run(both())

    assert plain(large.logprobs) == [[[-1, -2], [-3]], [], [[], [-4, -5, -np.inf]]]
    assert plain(small.entropy) == [[0.5]]


def test_the_first_error_ends_an_asyncio_call() -> None:
    asked = []

    async def fail(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        await asyncio.sleep(0)
        return httpx.Response(422, json={"error": {"code": "invalid", "message": "bad", "param": None}})

    async def score() -> int:
        async with AsyncClient(transport=httpx.MockTransport(fail), max_request_tokens=2, max_in_flight=1) as client:
            with pytest.raises(InvalidRequestError):
                await client.score([[n] for n in range(1, 100)], [[8]] * 99)
            return len(asyncio.all_tasks())

    assert asyncio.run(score()) == 1
    assert len(asked) < 50


def test_the_bar_counts_completions(capsys: pytest.CaptureFixture[str]) -> None:
    client_of(Echo(), max_request_tokens=2).score([[1], [2], [3]], [[8], [8], [8]], progress=True)

    assert "3/3" in capsys.readouterr().err


def test_a_bar_without_tqdm_says_what_to_install() -> None:
    script = """
import sys
sys.modules["tqdm"] = None
from logprobd_client.progress import progress_bar
try:
    with progress_bar(1, True): pass
except ImportError as error:
    print(error)
"""

    assert run_python(script) == "progress=True needs tqdm: pip install 'logprobd-client[progress]'"
