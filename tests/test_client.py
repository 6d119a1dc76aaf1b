"""The real client against the real service: nothing between the two is simulated."""

from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from logprobd_client import (
    ApiError,
    Client,
    ConnectionFailedError,
    InvalidRequestError,
    ModelMismatchError,
    TooLargeError,
    UnavailableError,
)
from running import Running, free_port


@pytest.fixture
def client(tiny_service: Running) -> Iterator[Client]:
    with Client(tiny_service.url) as connected:
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
        Client(tiny_service.url, expect={"fingerprint": "0" * 16}) as wary,
        pytest.raises(ModelMismatchError, match="fingerprint"),
    ):
        wary.score([[1]], [[2]])
    with Client(f"http://127.0.0.1:{free_port()}") as lost, pytest.raises(ConnectionFailedError):
        lost.info()
    with pytest.raises(ValueError, match="2 prompts and 1 completions"):
        client.score([[1], [2]], [[3]])

    assert invalid.value.param == "groups[0].completions[1][1]"
    assert invalid.value.code == "invalid"
    assert invalid.value.request_id


def test_a_refusal_for_now_says_when_to_come_back() -> None:
    def full(_request: httpx.Request) -> httpx.Response:
        error = {"error": {"code": "overloaded", "message": "full", "param": None}}
        return httpx.Response(429, json=error, headers={"Retry-After": "7"})

    with Client(transport=httpx.MockTransport(full)) as client, pytest.raises(UnavailableError) as refusal:
        client.score([[1]], [[2]])

    assert refusal.value.retry_after == 7


def test_an_answer_that_is_not_ours_is_shown() -> None:
    proxy = httpx.MockTransport(lambda _request: httpx.Response(502, text="Bad Gateway"))
    with Client(transport=proxy) as client, pytest.raises(ApiError, match="502 : Bad Gateway"):
        client.info()
