"""The real client against the real service: nothing between the two is simulated."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from logprobd_client import (
    ApiError,
    AsyncClient,
    Client,
    ConnectionFailedError,
    InvalidRequestError,
    ModelMismatchError,
    TooLargeError,
    UnavailableError,
)
from running import ROOT, WIRES, Running, environment, free_port


@pytest.fixture(params=WIRES, ids=["binary" if binary else "json" for binary in WIRES])
def client(tiny_service: Running, request: pytest.FixtureRequest) -> Iterator[Client]:
    with Client(tiny_service.url, binary=request.param) as connected:
        yield connected


def test_flat_completions_come_back_flat(client: Client) -> None:
    result = client.score([[1, 2], [3]], [[4, 5, 6], [7]], entropy=True, top_logprobs=2)

    assert [array.shape for array in result.logprobs] == [(3,), (1,)]
    assert {array.dtype for array in result.logprobs} == {np.dtype(np.float32)}
    assert result.entropy is not None
    assert [array.shape for array in result.entropy] == [(3,), (1,)]
    assert result.top_ids is not None
    assert [array.shape for array in result.top_ids] == [(3, 2), (1, 2)]
    assert result.token_ids is None
    assert result.usage["completion_tokens"] == 4


def test_grouped_completions_come_back_grouped(client: Client) -> None:
    flat = client.score([[1, 2], [1, 2], [3]], [[4, 5], [6], [7]])
    grouped = client.score([[1, 2], [3]], [[[4, 5], [6]], [[7]]])

    assert [len(group) for group in grouped.logprobs] == [2, 1]
    for one, other in zip(flat.logprobs, [array for group in grouped.logprobs for array in group], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_numpy_ids_and_empty_completions_are_fine(client: Client) -> None:
    result = client.score([np.array([1, 2]), [3]], [[], np.array([4], dtype=np.int32)])

    assert [len(array) for array in result.logprobs] == [0, 1]


def test_sums_come_as_numbers(client: Client) -> None:
    arrays = client.score([[1, 2]], [[[4, 5], [6]]], temperature=0.5)
    sums = client.score([[1, 2]], [[[4, 5], [6]]], temperature=0.5, reduce="sum")

    assert sums.logprobs[0] == pytest.approx([array.sum() for array in arrays.logprobs[0]], abs=1e-5)
    assert sums.temperature == 0.5


def test_each_kind_of_error_has_its_class(tiny_service: Running, client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="999 is not in the vocabulary") as invalid:
        client.score([[1]], [[[2], [3, 999]]])
    with pytest.raises(TooLargeError):
        client.score([[1] * 5000], [[2]])
    with (
        Client(tiny_service.url, expect={"fingerprint": "0" * 16}, binary=client.binary) as wary,
        pytest.raises(ModelMismatchError, match="fingerprint"),
    ):
        wary.score([[1]], [[2]])
    with Client(f"http://127.0.0.1:{free_port()}", retry_for=0) as lost, pytest.raises(ConnectionFailedError):
        lost.info()
    with pytest.raises(ValueError, match="2 prompts and 1 completions"):
        client.score([[1], [2]], [[3]])

    assert invalid.value.param == "groups[0].completions[1][1]"
    assert invalid.value.code == "invalid"
    assert invalid.value.request_id


def test_candidates_are_scored_where_they_are_asked_for(client: Client) -> None:
    every = np.tile(np.arange(20), (2, 1))
    result = client.score([[1, 2], [3]], [[4, 5], [6]], candidate_ids=[every, [[6, 7, 4]]], temperature=0.7)

    assert result.candidate_logprobs is not None
    assert result.candidate_logprobs[0].shape == (2, 20)
    assert result.candidate_logprobs[0][[0, 1], [4, 5]] == pytest.approx(result.logprobs[0], abs=1e-6)
    assert [array.shape for array in result.candidate_logprobs[1]] == [(3,)]
    assert result.candidate_logprobs[1][0][0] == pytest.approx(result.logprobs[1][0], abs=1e-6)


def test_a_cut_call_gives_what_a_whole_one_gives(tiny_service: Running, client: Client) -> None:
    prompts = [[number, 2, 3] for number in range(1, 9)]
    completions = [[[4, 5, number], [6], []] for number in range(1, 9)]
    whole = client.score(prompts, completions, entropy=True)
    with Client(tiny_service.url, binary=client.binary, max_request_tokens=10, max_in_flight=3) as cutting:
        cut = cutting.score(prompts, completions, entropy=True)

    assert cut.usage == whole.usage
    assert cut.entropy is not None
    assert whole.entropy is not None
    for one, other in zip([*cut.logprobs, *cut.entropy], [*whole.logprobs, *whole.entropy], strict=True):
        for array, wanted in zip(one, other, strict=True):
            assert array == pytest.approx(wanted, abs=1e-5)


def test_padded_rows_have_the_numbers_of_their_sequences(client: Client) -> None:
    completions, mask = np.array([[4, 5, 6], [7, 0, 0], [8, 9, 0]]), np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    padded = client.score_padded([[1, 2], [1, 2], [3]], completions, mask)
    apart = client.score([[1, 2], [3]], [[4, 5, 6], [8, 9]]).logprobs

    assert padded.logprobs.shape == (3, 3)
    assert padded.logprobs[0] == pytest.approx([apart[0][0], 0, apart[0][2]], abs=1e-5)
    assert padded.logprobs[1].tolist() == [0, 0, 0]
    assert padded.logprobs[2] == pytest.approx([*apart[1], 0], abs=1e-5)


@pytest.mark.parametrize("binary", WIRES)
def test_the_asyncio_client_scores_alike(tiny_service: Running, client: Client, binary: bool) -> None:
    calls: list[dict[str, Any]] = [{"temperature": t} for t in (0.5, 1.0, 2.0)]

    async def score() -> list[Any]:
        async with AsyncClient(tiny_service.url, binary=binary) as connected:
            assert (await connected.info())["model"]["vocab_size"] > 0
            results = await asyncio.gather(*(connected.score([[1, 2]], [[4, 5, 6]], **call) for call in calls))
            return [result.logprobs[0] for result in results]

    for array, call in zip(asyncio.run(score()), calls, strict=True):
        assert array == pytest.approx(client.score([[1, 2]], [[4, 5, 6]], **call).logprobs[0], abs=1e-5)


def test_a_refusal_for_now_says_when_to_come_back() -> None:
    def full(_request: httpx.Request) -> httpx.Response:
        error = {"error": {"code": "overloaded", "message": "full", "param": None}}
        return httpx.Response(429, json=error, headers={"Retry-After": "7"})

    with Client(transport=httpx.MockTransport(full), retry_for=0) as client, pytest.raises(UnavailableError) as refusal:
        client.score([[1]], [[2]])

    assert refusal.value.retry_after == 7


def test_an_answer_that_is_not_ours_is_shown() -> None:
    proxy = httpx.MockTransport(lambda _request: httpx.Response(502, text="Bad Gateway"))
    with Client(transport=proxy, retry_for=0) as client, pytest.raises(ApiError, match="502 : Bad Gateway"):
        client.info()


def test_a_trainer_needs_nothing_but_the_client(tiny_service: Running) -> None:
    """Its process can import nothing heavy; what it samples comes closer to what the service holds."""
    script = [sys.executable, str(ROOT / "tests" / "scripted_trainer.py"), tiny_service.url]
    lines = subprocess.run(script, env=environment(), capture_output=True, text=True, check=True, timeout=120).stdout
    divergence = [float(line) for line in lines.split()]

    assert divergence[0] > 0.2
    assert np.mean(divergence[-3:]) < 0.3 * divergence[0]
