"""The JSON form: for text, and for whoever wants to read along."""

import json
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from logprobd_client.requests import Group, IntArray, Options, Part, options_on_wire, pieces
from logprobd_client.results import FloatArray, Result, candidate_scores

LOWEST = np.finfo(np.float32).min  # what stands in JSON for a probability of zero


def encode(part: Part, options: Options) -> bytes:
    body = {"groups": [group_on_wire(group) for group in part.groups], **options_on_wire(options)}
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def group_on_wire(group: Group) -> dict[str, Any]:
    completions = [text_on_wire(completion) for completion in group.completions]
    wire: dict[str, Any] = {"prompt": text_on_wire(group.prompt), "completions": completions}
    if group.candidates is not None:
        wire["candidate_ids"] = [[ids.tolist() for ids in pieces(c.ids, c.lengths)] for c in group.candidates]
    return wire


def text_on_wire(value: str | IntArray) -> str | list[int]:
    return value if isinstance(value, str) else value.tolist()


def decode(content: bytes, part: Part, options: Options) -> Result:
    reply = json.loads(content)
    answers = [answer for group in reply["groups"] for answer in group["completions"]]

    def column(name: str, read: Callable[[Any], Any]) -> list[Any] | None:
        """One item a completion, None for those that have no such field; None if that is all of them."""
        values = [answer.get(name) for answer in answers]
        if all(value is None for value in values):
            return None
        return [None if value is None else read(value) for value in values]

    def rows(value: Any) -> FloatArray:
        return logprobs_of(value).reshape(-1, options.top_logprobs)

    def rows_of_ids(value: Any) -> IntArray:
        return ids_of(value).reshape(-1, options.top_logprobs)

    summed = options.reduce == "sum"
    candidates = column("candidate_logprobs", lambda lists: logprobs_of(list(chain(*lists))))
    return Result(
        logprobs=column("sum" if summed else "logprobs", sum_of if summed else logprobs_of) or [],
        entropy=column("entropy", floats_of),
        top_ids=column("top_ids", rows_of_ids),
        top_logprobs=column("top_logprobs", rows),
        candidate_logprobs=None if candidates is None else candidate_scores(candidates, part.candidates),
        token_ids=column("token_ids", ids_of),
        temperature=reply["temperature"],
        model=reply["model"],
        usage=reply["usage"],
    )


def floats_of(value: Any) -> FloatArray:
    return np.array(value, dtype=np.float32)


def ids_of(value: Any) -> IntArray:
    return np.array(value, dtype=np.int32)


def logprobs_of(value: Any) -> FloatArray:
    """Numbers with the infinity that JSON cannot say."""
    numbers = floats_of(value)
    return np.where(numbers == LOWEST, np.float32(-np.inf), numbers)


def sum_of(value: float) -> float:
    return float(logprobs_of(value))
