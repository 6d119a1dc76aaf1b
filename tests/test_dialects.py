"""Other servers' routes: right numbers in their words, real clients unmodified, generation refused."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import openai
import pytest

from oracle import ids_of, own_distribution, own_logprobs
from running import Running

IDS = [504, 3575, 282, 4649, 314, 7042, 30]
MANY = [[1, 2, 3, 4], [5, 6], [7], [504, 3575, 282]]


@pytest.fixture(scope="module")
def truth(embedded_model: Any) -> Any:
    """The logprob rows that predict what follows each of IDS, from a forward of its own."""
    return own_distribution(embedded_model, ids_of(IDS[:1]), ids_of([*IDS[1:], 0]))


def post(service: Running, path: str, body: object) -> Any:
    response = httpx.post(service.url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def completion(service: Running, **body: Any) -> Any:
    return post(service, "/v1/completions", {"max_tokens": 1, **body})["choices"]


def test_echo_lists_every_token_and_the_most_likely_next(embedded_service: Running, truth: Any) -> None:
    (choice,) = completion(embedded_service, prompt=IDS, echo=True, logprobs=1, temperature=0)
    listed = choice["logprobs"]
    following = int(truth[-1].argmax())

    assert choice["prompt_token_ids"] == IDS
    assert len(listed["tokens"]) == len(IDS) + 1
    assert listed["token_logprobs"][0] is None
    expected = [truth[place][token] for place, token in enumerate([*IDS[1:], following])]
    assert listed["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    for place, own, top in zip(range(len(IDS)), listed["token_logprobs"][1:], listed["top_logprobs"][1:], strict=True):
        assert (own == max(top.values())) == (truth[place].argmax() == [*IDS[1:], following][place])
        assert own in top.values()
    assert [
        choice["text"][offset:].startswith(t) for offset, t in zip(listed["text_offset"], listed["tokens"], strict=True)
    ]
    assert choice["text"] == "".join(listed["tokens"])


def test_without_a_next_token_there_is_none(embedded_service: Running) -> None:
    (choice,) = completion(embedded_service, prompt="The capital of France", max_tokens=0, echo=True, logprobs=0)

    assert choice["text"] == "The capital of France"
    assert choice["logprobs"]["tokens"] == ["The", " capital", " of", " France"]
    assert [None if top is None else len(top) for top in choice["logprobs"]["top_logprobs"]] == [None, 1, 1, 1]


def test_prompt_logprobs_have_the_token_itself_first_with_its_rank(embedded_service: Running, truth: Any) -> None:
    (choice,) = completion(embedded_service, prompt=IDS, prompt_logprobs=3, max_tokens=0)

    assert choice["prompt_logprobs"][0] is None
    for place, entry in enumerate(choice["prompt_logprobs"][1:]):
        own = IDS[place + 1]
        rank = 1 + int((truth[place] > truth[place][own]).sum())
        assert next(iter(entry)) == str(own)
        assert entry[str(own)]["rank"] == rank
        assert len(entry) == (3 if rank <= 3 else 4)
        for token, listed in entry.items():
            assert listed["logprob"] == pytest.approx(truth[place][int(token)], abs=1e-4)


def test_a_temperature_is_applied_and_named(embedded_service: Running, embedded_model: Any) -> None:
    body = {"prompt": IDS, "prompt_logprobs": 0, "max_tokens": 0, "temperature": 0.6}
    reply = post(embedded_service, "/v1/completions", body)
    expected = own_logprobs(embedded_model, ids_of(IDS[:1]), ids_of(IDS[1:]), temperature=0.6)

    assert reply["temperature"] == 0.6
    listed = [next(iter(entry.values()))["logprob"] for entry in reply["choices"][0]["prompt_logprobs"][1:]]
    assert listed == pytest.approx(expected, abs=2e-4)


def test_many_prompts_come_back_in_order_and_count_what_they_share(embedded_service: Running) -> None:
    body = {"prompt": [IDS, IDS[:4], [5]], "prompt_logprobs": 0, "max_tokens": 1}
    reply = post(embedded_service, "/v1/completions", body)

    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [IDS, IDS[:4], [5]]
    assert reply["usage"] == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15, "computed_tokens": 8}


def test_text_and_its_ids_score_alike(embedded_service: Running) -> None:
    text, ids = (
        completion(embedded_service, prompt=prompt, echo=True, logprobs=2)[0]
        for prompt in ("The capital of France is Paris.", IDS)
    )

    assert text == ids


def test_the_openai_package_scores(embedded_service: Running) -> None:
    client = openai.OpenAI(base_url=embedded_service.url + "/v1", api_key="none", max_retries=0)
    (model,) = client.models.list().data
    reply = client.completions.create(model=model.id, prompt=IDS, max_tokens=0, echo=True, logprobs=1, temperature=0)
    expected = completion(embedded_service, prompt=IDS, max_tokens=0, echo=True, logprobs=1)[0]["logprobs"]

    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.token_logprobs == expected["token_logprobs"]
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens"):
        client.completions.create(model=model.id, prompt="Hello", max_tokens=16, logprobs=1)


@pytest.fixture
def trl_client(embedded_service: Running) -> Iterator[Any]:
    """TRL's own client, which insists on an installed vllm that scoring does not need."""
    with patch("trl.generation.vllm_client.is_vllm_available", return_value=True):
        from trl.generation.vllm_client import VLLMClient

        yield VLLMClient(base_url=embedded_service.url, connection_timeout=30)


def test_trls_own_client_scores_a_teachers_sequences(trl_client: Any, embedded_model: Any) -> None:
    sequences = [IDS, [*IDS[:3], 9, 10, 11]]
    reply = trl_client.get_sequence_logprobs(sequences, [2, 3], top_logprobs=5, temperature=0.8)

    for number, (ids, prompt) in enumerate(zip(sequences, (2, 3), strict=True)):
        rows = own_distribution(embedded_model, ids_of(ids[:prompt]), ids_of(ids[prompt:]), temperature=0.8)
        actual = np.array(reply["actual_logprobs"][number])[:, 0]
        best = np.array(reply["logprobs"][number])
        tokens = np.array(reply["logprob_token_ids"][number])
        assert actual == pytest.approx([row[token] for row, token in zip(rows, ids[prompt:], strict=True)], abs=2e-4)
        assert best == pytest.approx(np.sort(rows, axis=1)[:, ::-1][:, :5], abs=2e-4)
        assert np.array_equal(tokens[:, 0], rows.argmax(axis=1))


def test_vllms_route_for_ids_is_read_as_prime_rl_does(embedded_service: Running, truth: Any) -> None:
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    reply = post(embedded_service, "/inference/v1/generate", {"token_ids": IDS, "sampling_params": sampling})
    firsts = [next(iter(entry.values()))["logprob"] for entry in reply["prompt_logprobs"][1:]]

    assert reply["prompt_logprobs"][0] is None
    assert firsts == pytest.approx([truth[place][token] for place, token in enumerate(IDS[1:])], abs=1e-4)
    assert reply["choices"][0]["token_ids"] == [int(truth[-1].argmax())]


@pytest.mark.parametrize("start", [0, 3, len(IDS) - 1])
def test_sglangs_route_lists_from_the_place_asked(embedded_service: Running, truth: Any, start: int) -> None:
    body = {
        "input_ids": IDS,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0, "skip_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
    }
    meta = post(embedded_service, "/generate", body)["meta_info"]

    assert [entry[1] for entry in meta["input_token_logprobs"]] == IDS[start:]
    assert meta["input_token_logprobs"][0][0] is None
    expected = [truth[start + place][token] for place, token in enumerate(IDS[start + 1 :])]
    assert [entry[0] for entry in meta["input_token_logprobs"][1:]] == pytest.approx(expected, abs=1e-4)
    assert [len(top or []) for top in meta["input_top_logprobs"]] == [0] + [2] * (len(IDS) - start - 1)
    assert meta["output_token_logprobs"] == []
    assert meta["prompt_tokens"] == len(IDS)


def test_sglangs_route_takes_lists_and_text(embedded_service: Running) -> None:
    asked = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "return_text_in_logprobs": True}
    listed = post(embedded_service, "/generate", {"input_ids": MANY, "logprob_start_len": 0, **asked})
    text = post(embedded_service, "/generate", {"text": "The capital of France is", **asked})

    assert [[entry[1] for entry in item["meta_info"]["input_token_logprobs"]] for item in listed] == MANY
    assert text["text"] == " Paris"
    assert text["meta_info"]["input_token_logprobs"] == [[None, 314, " is"]]


LOGPROBS = {"prompt": [1, 2], "max_tokens": 1, "logprobs": 1}
GENERATE = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 1}}
SGLANG = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(
            ("/v1/completions", {**LOGPROBS, name: value}, name)
            for name, value in {
                "max_tokens": 2,
                "n": 2,
                "best_of": 2,
                "stream": True,
                "stop": ["x"],
                "top_p": 0.9,
                "top_k": 5,
                "min_p": 0.1,
                "presence_penalty": 1,
                "frequency_penalty": 0.5,
                "repetition_penalty": 1.1,
                "logit_bias": {"5": 1},
                "suffix": "x",
                "temperature": -1,
                "model": "gpt-9",
                "logprobs": 257,
                "prompt_logprobs": -1,
                "unknown": 1,
            }.items()
        ),
        ("/v1/completions", {"prompt": [1, 2], "logprobs": 1}, "max_tokens"),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": None, "logprobs": 1}, "max_tokens"),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}, "logprobs"),
        ("/v1/completions", {**LOGPROBS, "prompt": []}, "prompt"),
        ("/v1/completions", {**LOGPROBS, "prompt": ""}, "prompt"),
        ("/v1/completions", {**LOGPROBS, "prompt": [[1], []]}, "prompt[1]"),
        ("/v1/completions", {**LOGPROBS, "prompt": [[1], [2, -1]]}, "prompt[1][1]"),
        ("/v1/completions", {**LOGPROBS, "prompt": [[1], [2, 49152]]}, "prompt[1][1]"),
        ("/v1/completions", {**LOGPROBS, "prompt": ["a", 5]}, "prompt[1]"),
        ("/v1/completions", {**LOGPROBS, "prompt": [1, True]}, "prompt[1]"),
        ("/v1/completions", {**LOGPROBS, "prompt": {"a": 1}}, "prompt"),
        ("/inference/v1/generate", {**GENERATE, "stream": True}, "stream"),
        ("/inference/v1/generate", {**GENERATE, "token_ids": []}, "prompt"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
            "sampling_params.prompt_logprobs",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"max_tokens": 9, "prompt_logprobs": 1}},
            "sampling_params.max_tokens",
        ),
        ("/generate", {**SGLANG, "stream": True}, "stream"),
        ("/generate", {**SGLANG, "return_logprob": False}, "return_logprob"),
        ("/generate", {**SGLANG, "text": "x"}, "input_ids"),
        ("/generate", {**SGLANG, "logprob_start_len": 2}, "logprob_start_len"),
        ("/generate", {**SGLANG, "sampling_params": {"max_new_tokens": 8}}, "sampling_params.max_new_tokens"),
    ],
)
def test_what_asks_for_generation_or_is_wrong_is_refused(
    embedded_service: Running, path: str, body: object, param: str
) -> None:
    response = httpx.post(embedded_service.url + path, json=body, timeout=30)

    assert response.status_code == 422, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1, "stream": False, "top_p": 1.0, "stop": None, "seed": 1234, "user": "x", "presence_penalty": 0},
        {"echo": None, "temperature": None, "prompt_logprobs": None, "model": None, "suffix": None, "logit_bias": None},
    ],
)
def test_options_that_change_nothing_are_taken(embedded_service: Running, extra: dict[str, Any]) -> None:
    assert completion(embedded_service, **LOGPROBS, **extra) == completion(embedded_service, **LOGPROBS)


def test_a_prompt_that_leaves_no_room_for_the_next_token_is_too_long(tiny_service: Running) -> None:
    limit = tiny_service.get("/info").json()["limits"]["max_sequence_tokens"]
    body = {"prompt": [1] * limit, "max_tokens": 1, "logprobs": 1}
    response = httpx.post(tiny_service.url + "/v1/completions", json=body, timeout=30)
    fits = httpx.post(tiny_service.url + "/v1/completions", json={**body, "max_tokens": 0}, timeout=30)

    assert (response.status_code, response.json()["error"]["param"]) == (413, "prompt")
    assert fits.status_code == 200


def test_a_model_without_a_tokenizer_names_tokens_by_their_ids(tiny_service: Running) -> None:
    body = {"prompt": [1, 2], "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = post(tiny_service, "/v1/completions", body)["choices"]
    refused = httpx.post(tiny_service.url + "/v1/completions", json={**body, "prompt": "text"}, timeout=30)

    assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2"]
    assert refused.status_code == 422
