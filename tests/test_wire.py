"""`POST /logprobs` over real HTTP: the shape of replies, and an error for everything that can be wrong."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from running import Running

ONE = {"prompt": [1, 2, 3], "completions": [[4, 5]]}
GROUPS = {"groups": [{"prompt": [1, 2], "completions": [[3, 4], [5]]}, {"prompt": [6], "completions": [[7]]}]}


def scores(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [completion for group in response.json()["groups"] for completion in group["completions"]]


def test_a_reply_has_one_number_a_token_in_the_order_sent(tiny_service: Running) -> None:
    reply = tiny_service.post(GROUPS).json()

    assert [[len(c["logprobs"]) for c in group["completions"]] for group in reply["groups"]] == [[2, 1], [1]]
    assert set(reply) == {"groups", "temperature", "model", "usage"}
    assert reply["temperature"] == 1.0
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "computed_tokens": 4}
    assert set(reply["model"]) == {
        "id",
        "fingerprint",
        "weights_version",
        "precision",
        "head_precision",
        "vocab_size",
    }


def test_both_forms_give_the_same_answer(tiny_service: Running) -> None:
    single = scores(tiny_service.post(ONE))

    assert single == scores(tiny_service.post({"groups": [ONE]}))


def test_numbers_round_trip_as_float32(tiny_service: Running) -> None:
    text = tiny_service.post(GROUPS).text
    numbers = [n for group in json.loads(text)["groups"] for c in group["completions"] for n in c["logprobs"]]

    assert all(str(np.float32(number)) in text for number in numbers)


def test_options_add_their_fields_and_only_those(tiny_service: Running) -> None:
    everything = {
        **ONE,
        "temperature": 0.5,
        "top_logprobs": 3,
        "entropy": True,
        "tokens": True,
        "candidate_ids": [[[9, 4], []]],
    }
    (plain,) = scores(tiny_service.post(ONE))
    (full,) = scores(tiny_service.post(everything))

    assert set(plain) == {"logprobs"}
    assert set(full) == {"logprobs", "entropy", "top_ids", "top_logprobs", "candidate_logprobs", "token_ids"}
    assert [len(row) for row in full["top_ids"]] == [3, 3]
    assert [len(row) for row in full["candidate_logprobs"]] == [2, 0]
    assert full["candidate_logprobs"][0][1] == full["logprobs"][0]
    assert full["token_ids"] == [4, 5]
    assert full["logprobs"] != plain["logprobs"]


def test_sum_gives_one_number_a_completion(tiny_service: Running) -> None:
    parts = scores(tiny_service.post(GROUPS))
    sums = scores(tiny_service.post({**GROUPS, "reduce": "sum"}))

    assert [set(item) for item in sums] == [{"sum"}] * 3
    assert [item["sum"] for item in sums] == pytest.approx([sum(item["logprobs"]) for item in parts], abs=1e-5)


def test_nothing_to_score_is_answered_with_nothing(tiny_service: Running) -> None:
    body = {"prompt": [1], "completions": [[], [2]], "entropy": True, "top_logprobs": 1, "candidate_ids": [[], [[3]]]}
    empty, _ = scores(tiny_service.post(body))

    assert empty == {"logprobs": [], "entropy": [], "top_ids": [], "top_logprobs": [], "candidate_logprobs": []}
    assert scores(tiny_service.post({"groups": []})) == []
    assert tiny_service.post({"prompt": [1], "completions": []}).json()["groups"] == [{"completions": []}]


def test_the_first_and_last_id_of_the_vocabulary_are_legal(tiny_service: Running) -> None:
    last = tiny_service.get("/info").json()["limits"]["vocab_size"] - 1

    assert len(scores(tiny_service.post({"prompt": [0, last], "completions": [[last, 0]]}))) == 1


def test_an_expectation_that_holds_changes_nothing(tiny_service: Running) -> None:
    model = tiny_service.get("/info").json()["model"]
    expect = {"model": model["id"], "weights_version": 0, "fingerprint": model["fingerprint"]}

    assert scores(tiny_service.post({**ONE, "expect": expect})) == scores(tiny_service.post(ONE))


INVALID: list[tuple[object, str | None]] = [
    ({}, None),
    ([1, 2], None),
    ("text", None),
    (None, None),
    ({"prompt": [1]}, None),
    ({"completions": [[1]]}, None),
    ({**ONE, "groups": []}, None),
    ({"groups": [ONE], "candidate_ids": []}, None),
    ({**ONE, "prompt": []}, "prompt"),
    ({"groups": [ONE, {"prompt": [], "completions": []}]}, "groups[1].prompt"),
    ({**ONE, "prompt": [1, True]}, "prompt[1]"),
    ({**ONE, "prompt": [1, 1.5]}, "prompt[1]"),
    ({**ONE, "prompt": [1, 1.0]}, "prompt[1]"),
    ({**ONE, "prompt": [1, "2"]}, "prompt[1]"),
    ({**ONE, "prompt": [1, None]}, "prompt[1]"),
    ({**ONE, "prompt": [1, [2]]}, "prompt[1]"),
    ({**ONE, "prompt": [1, -1]}, "prompt[1]"),
    ({**ONE, "prompt": [-100]}, "prompt[0]"),
    ({**ONE, "prompt": [211]}, "prompt[0]"),
    ({**ONE, "prompt": [2**31]}, "prompt[0]"),
    ({**ONE, "prompt": [2**32 + 1]}, "prompt[0]"),
    ({**ONE, "prompt": [2**53 + 1]}, "prompt[0]"),
    ({**ONE, "prompt": [2**63]}, "prompt[0]"),
    ({**ONE, "prompt": {"ids": [1]}}, "prompt"),
    ({**ONE, "prompt": 7}, "prompt"),
    ({**ONE, "prompt": True}, "prompt"),
    ({**ONE, "prompt": "text"}, "prompt"),
    ({**ONE, "completions": ["text"]}, "completions[0]"),
    ({**ONE, "completions": [4, 5]}, "completions[0]"),
    ({**ONE, "completions": {}}, "completions"),
    ({**ONE, "completions": [[4], [5, 999]]}, "completions[1][1]"),
    ({"groups": [{"prompt": [1], "completions": [[2], [3, 4, 211]]}]}, "groups[0].completions[1][2]"),
    ({"groups": [{"prompt": [1]}]}, "groups[0].completions"),
    ({"groups": {}}, "groups"),
    ({"groups": [{**ONE, "temperature": 1}]}, "groups[0].temperature"),
    ({**ONE, "temperature": 0}, "temperature"),
    ({**ONE, "temperature": -1}, "temperature"),
    ({**ONE, "temperature": "1"}, "temperature"),
    ({**ONE, "temperature": True}, "temperature"),
    ({**ONE, "temperature": None}, "temperature"),
    ({**ONE, "top_logprobs": -1}, "top_logprobs"),
    ({**ONE, "top_logprobs": 257}, "top_logprobs"),
    ({**ONE, "top_logprobs": 212}, "top_logprobs"),
    ({**ONE, "top_logprobs": 10**9}, "top_logprobs"),
    ({**ONE, "top_logprobs": 1.0}, "top_logprobs"),
    ({**ONE, "top_logprobs": True}, "top_logprobs"),
    ({**ONE, "entropy": 1}, "entropy"),
    ({**ONE, "tokens": "yes"}, "tokens"),
    ({**ONE, "reduce": "mean"}, "reduce"),
    ({**ONE, "expect": "model"}, "expect"),
    ({**ONE, "expect": {"version": 1}}, "expect.version"),
    ({**ONE, "top_k": 5}, "top_k"),
    ({**ONE, "max_tokens": 5}, "max_tokens"),
    ({**ONE, "candidate_ids": [[[1], [2]], []]}, "candidate_ids"),
    ({**ONE, "candidate_ids": [[[1]]]}, "candidate_ids[0]"),
    ({**ONE, "candidate_ids": [[1, 2]]}, "candidate_ids[0][0]"),
    ({**ONE, "candidate_ids": [[[1], [2, True]]]}, "candidate_ids[0][1][1]"),
    ({**ONE, "candidate_ids": [[[1, 2], [3, 211]]]}, "candidate_ids[0][1][1]"),
    ({**ONE, "candidate_ids": [[[1], [-1]]]}, "candidate_ids[0][1][0]"),
]


@pytest.mark.parametrize(("body", "param"), INVALID, ids=lambda value: json.dumps(value)[:60])
def test_an_invalid_request_names_the_field(tiny_service: Running, body: object, param: str | None) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(tiny_service.url + "/logprobs", content=json.dumps(body), headers=headers)

    assert response.status_code == 422, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid"
    assert error["param"] == param
    assert error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": [1], "completions": [[2]], "temperature": NaN}', b"\xff", b"[" * 100_000, b'"\\ud800"'],
)
def test_what_is_not_json_is_malformed(tiny_service: Running, body: bytes) -> None:
    response = httpx.post(tiny_service.url + "/logprobs", content=body, headers={"Content-Type": "application/json"})

    assert response.status_code == 400
    assert response.json()["error"]["code"] == "malformed"


@pytest.mark.parametrize("temperature", ["1e999", "-Infinity"])
def test_an_infinite_temperature_is_refused(tiny_service: Running, temperature: str) -> None:
    body = '{"prompt": [1], "completions": [[2]], "temperature": ' + temperature + "}"
    headers = {"Content-Type": "application/json"}

    assert httpx.post(tiny_service.url + "/logprobs", content=body, headers=headers).status_code in (400, 422)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/x-pickle"])
def test_another_media_type_is_refused(tiny_service: Running, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    response = httpx.post(tiny_service.url + "/logprobs", content=json.dumps(ONE), headers=headers)

    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    ("name", "value"), [("model", "other"), ("weights_version", 1), ("fingerprint", "0123456789abcdef")]
)
def test_an_expectation_that_fails_is_a_conflict(tiny_service: Running, name: str, value: object) -> None:
    response = tiny_service.post({**ONE, "expect": {name: value}})

    assert response.status_code == 409
    assert response.json()["error"]["code"] == "model_mismatch"
    assert response.json()["error"]["param"] == f"expect.{name}"


def test_a_sequence_longer_than_the_model_is_too_long(tiny_service: Running) -> None:
    limit = tiny_service.get("/info").json()["limits"]["max_sequence_tokens"]
    longest = {"prompt": [1] * (limit - 1), "completions": [[2]]}
    response = tiny_service.post({"prompt": [1] * (limit - 1), "completions": [[2], [2, 3]]})

    assert response.status_code == 413
    assert response.json()["error"]["code"] == "sequence_too_long"
    assert response.json()["error"]["param"] == "completions[1]"
    assert str(limit) in response.json()["error"]["message"]
    assert "retry-after" not in response.headers
    assert len(scores(tiny_service.post(longest))) == 1


def test_unknown_routes_and_methods_have_the_same_error_form(tiny_service: Running) -> None:
    unknown = tiny_service.get("/nothing")
    method = tiny_service.get("/logprobs")

    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("given", "kept"),
    [("trainer-7.step_12", True), ("a" * 129, False), ("x y", False), ("", False), ("é", False)],
)
def test_a_harmless_request_id_comes_back_and_any_other_is_replaced(
    tiny_service: Running, given: str, kept: bool
) -> None:
    response = httpx.get(tiny_service.url + "/healthz", headers={b"X-Request-Id": given.encode()})

    assert (response.headers["x-request-id"] == given) is kept
    assert response.headers["x-request-id"]


def test_info_names_every_limit_and_the_selftest(tiny_service: Running) -> None:
    info = tiny_service.get("/info").json()

    assert set(info) == {"model", "layout", "selftest", "limits", "memory", "queue", "workers", "versions"}
    assert info["layout"] == info["selftest"]["layout"] == "shared"
    assert info["selftest"]["max_error"] < 1e-4
    assert info["model"]["family"] == "llama"
    assert info["workers"][0]["state"] == "ready"


def test_the_openapi_document_describes_the_request(tiny_service: Running) -> None:
    document = tiny_service.get("/openapi.json").json()
    body = document["paths"]["/logprobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]

    assert set(ONE) < set(document["components"]["schemas"][name]["properties"])
    assert {"Group", "Expect", "LogprobsReply", "ErrorReply"} <= set(document["components"]["schemas"])
    assert tiny_service.get("/docs").status_code == 200
