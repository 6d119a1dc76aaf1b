"""The binary form of `POST /logprobs`: the same numbers as JSON, and an error for everything that can be wrong."""

from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from running import Running

TYPE = "application/vnd.safetensors"
GROUPS = [([1, 2], [[3, 4], [5], []]), ([6], [[7, 8, 9]])]
ASKED = {"temperature": 0.7, "entropy": True, "top_logprobs": 2}

Tensors = dict[str, NDArray[Any]]


def i32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def tensors_of(groups: list[tuple[list[int], list[list[int]]]] = GROUPS) -> Tensors:
    completions = [completion for _, group in groups for completion in group]
    return {
        "prompt_ids": i32([token for prompt, _ in groups for token in prompt]),
        "prompt_lengths": i32([len(prompt) for prompt, _ in groups]),
        "completions_per_prompt": i32([len(group) for _, group in groups]),
        "completion_ids": i32([token for completion in completions for token in completion]),
        "completion_lengths": i32([len(completion) for completion in completions]),
    }


def body_of(tensors: Tensors, options: object = None) -> bytes:
    metadata = {} if options is None else {"options": orjson.dumps(options).decode()}
    return safetensors.numpy.save(tensors, metadata)


def post(service: Running, body: bytes, accept: str = TYPE) -> httpx.Response:
    headers = {"Content-Type": TYPE, "Accept": accept}
    return httpx.post(service.url + "/logprobs", content=body, headers=headers, timeout=60)


def read(response: httpx.Response) -> tuple[Tensors, dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == TYPE
    header = orjson.loads(response.content[8 : 8 + int.from_bytes(response.content[:8], "little")])
    return safetensors.numpy.load(response.content), orjson.loads(header["__metadata__"]["reply"])


def as_json(**options: Any) -> dict[str, Any]:
    return {"groups": [{"prompt": prompt, "completions": group} for prompt, group in GROUPS], **options}


def flat(reply: dict[str, Any], name: str) -> list[Any]:
    return [number for group in reply["groups"] for item in group["completions"] for number in item[name]]


def test_the_numbers_are_those_of_json(tiny_service: Running) -> None:
    tensors, rest = read(post(tiny_service, body_of(tensors_of(), ASKED)))
    expected = tiny_service.post(as_json(**ASKED)).json()

    assert set(tensors) == {"logprobs", "lengths", "entropy", "top_ids", "top_logprobs"}
    assert tensors["lengths"].tolist() == [2, 1, 0, 3]
    for name in ("logprobs", "entropy", "top_ids", "top_logprobs"):
        assert np.array_equal(tensors[name], np.array(flat(expected, name), dtype=tensors[name].dtype))
    assert {name: expected[name] for name in ("temperature", "model", "usage")} == rest


def test_either_side_alone_may_be_binary(tiny_service: Running) -> None:
    expected = tiny_service.post(as_json()).json()
    out = httpx.post(tiny_service.url + "/logprobs", json=as_json(), headers={"Accept": TYPE}, timeout=60)

    assert post(tiny_service, body_of(tensors_of()), accept="application/json").json() == expected
    assert read(out)[0]["logprobs"].tolist() == [np.float32(number) for number in flat(expected, "logprobs")]


def test_sums_and_candidates_have_tensors_of_their_own(tiny_service: Running) -> None:
    given = {"candidate_ids": i32([3, 9, 5, 1, 1, 2]), "candidate_lengths": i32([2, 0, 1, 0, 1, 2])}
    tensors, _ = read(post(tiny_service, body_of(tensors_of() | given, {"reduce": "sum"})))
    candidates = [[[3, 9], []], [[5]], []], [[[], [1], [1, 2]]]
    body = as_json()
    for group, asked in zip(body["groups"], candidates, strict=True):
        group["candidate_ids"] = asked
    expected = tiny_service.post(body).json()
    sums = [sum(item["logprobs"]) for group in expected["groups"] for item in group["completions"]]

    assert set(tensors) == {"lengths", "sums", "candidate_logprobs"}
    assert tensors["sums"].tolist() == pytest.approx(sums, abs=1e-5)
    flat_candidates = [number for row in flat(expected, "candidate_logprobs") for number in row]
    assert tensors["candidate_logprobs"].tolist() == [np.float32(number) for number in flat_candidates]


def test_nothing_asked_is_nothing_answered(tiny_service: Running) -> None:
    tensors, rest = read(post(tiny_service, body_of(tensors_of([]), {"top_logprobs": 3})))

    assert tensors["logprobs"].shape == (0,)
    assert tensors["top_ids"].shape == (0, 3)
    assert rest["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "computed_tokens": 0}


def test_ids_in_json_may_be_answered_in_binary_but_token_strings_may_not_be_asked(tiny_service: Running) -> None:
    refused = post(tiny_service, body_of(tensors_of(), {"tokens": True}))

    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt_ids": None}, "prompt_ids"),
        ({"completion_lengths": None}, "completion_lengths"),
        ({"extra": i32([1])}, "extra"),
        ({"prompt_ids": np.array([1, 2, 6], dtype=np.int64)}, "prompt_ids"),
        ({"prompt_ids": np.array([1, 2, 6], dtype=np.uint16)}, "prompt_ids"),
        ({"prompt_ids": np.array([1, 2, 6], dtype=np.float32)}, "prompt_ids"),
        ({"prompt_ids": i32([1, 2, 6]).reshape(1, 3)}, "prompt_ids"),
        ({"prompt_ids": i32([1, -2, 6])}, "prompt_ids[1]"),
        ({"completion_lengths": i32([2, 1, -1, 4])}, "completion_lengths[2]"),
        ({"prompt_lengths": i32([2, 2])}, "prompt_lengths"),
        ({"prompt_lengths": i32([2**31 - 1, 2**31 - 1])}, "prompt_lengths"),
        ({"completions_per_prompt": i32([3])}, "completions_per_prompt"),
        ({"completions_per_prompt": i32([3, 2])}, "completions_per_prompt"),
        ({"prompt_lengths": i32([3, 0])}, "groups[1].prompt"),
        ({"prompt_ids": i32([1, 2, 999])}, "groups[1].prompt[0]"),
        ({"completion_ids": i32([3, 999, 5, 7, 8, 9])}, "groups[0].completions[0][1]"),
        ({"candidate_ids": i32([1])}, "candidate_ids"),
        ({"candidate_ids": i32([1]), "candidate_lengths": i32([1])}, "candidate_lengths"),
        ({"candidate_ids": i32([1] * 257), "candidate_lengths": i32([257, 0, 0, 0, 0, 0])}, "candidate_lengths"),
        (
            {"candidate_ids": i32([1, 999]), "candidate_lengths": i32([1, 0, 0, 0, 0, 1])},
            "groups[1].candidate_ids[0][2][0]",
        ),
    ],
)
def test_a_wrong_tensor_is_named(tiny_service: Running, change: dict[str, Any], param: str) -> None:
    tensors = {name: tensor for name, tensor in (tensors_of() | change).items() if tensor is not None}
    response = post(tiny_service, body_of(tensors))

    assert response.status_code == 422, response.text
    assert response.json()["error"]["code"] == "invalid"
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("options", "param"), [([], "options"), ({"temperature": 0}, "temperature"), ({"prompt": "x"}, "prompt")]
)
def test_wrong_options_are_named(tiny_service: Running, options: object, param: str) -> None:
    response = post(tiny_service, body_of(tensors_of(), options))

    assert response.status_code == 422
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00" * 7,
        b"\xff" * 64,
        b'{"prompt": [1]}',
        b"\x80\x04K\x01.",  # a pickle
        (1 << 62).to_bytes(8, "little") + b"{}",
        safetensors.numpy.save(tensors_of(), {"options": "{"}),
        safetensors.numpy.save(tensors_of())[:-3],
    ],
)
def test_what_is_not_safetensors_is_malformed(tiny_service: Running, body: bytes) -> None:
    response = post(tiny_service, body)

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "malformed"


def test_too_long_a_sequence_is_413_in_binary_too(tiny_service: Running) -> None:
    response = post(tiny_service, body_of(tensors_of([([1] * 600, [[2]])])))

    assert response.status_code == 413
    assert response.json()["error"]["param"] == "groups[0].completions[0]"
    assert "retry-after" not in response.headers
