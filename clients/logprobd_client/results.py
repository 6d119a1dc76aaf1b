"""What a call gives back, and how the answers to its parts become one."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logprobd_client.errors import ModelMismatchError
from logprobd_client.requests import Call, Candidates, pieces

FloatArray = NDArray[np.float32]

IDENTITY = ("fingerprint", "weights_version", "precision", "head_precision")
"""What two services must have in common to score alike. The id may differ: it can be a folder's name."""


@dataclass(frozen=True, slots=True)
class Result:
    """Scores, nested as the completions were given: one item a completion, or a list of them a prompt.

    For a completion of n tokens, an item of `logprobs` is a float32 array (n,), or a float with
    `reduce="sum"`; of `entropy` (n,), in nats; of `top_ids` (int32) and `top_logprobs` (n, k), the likeliest
    first; of `candidate_logprobs` (n, width) where the candidates came as an array, else a list of n arrays.
    These are None unless asked for. `token_ids` (int32) are what the service made of text, None for ids.
    A probability of zero is -inf. `model` is the identity of what answered, `usage` counts tokens over all
    requests of the call: `computed_tokens` are those that went through the model.
    """

    logprobs: list[Any]
    entropy: list[Any] | None
    top_ids: list[Any] | None
    top_logprobs: list[Any] | None
    candidate_logprobs: list[Any] | None
    token_ids: list[Any] | None
    temperature: float
    model: dict[str, Any]
    usage: dict[str, int]


@dataclass(frozen=True, slots=True)
class PaddedResult:
    """Scores of padded rows: float32 arrays (rows, longest), 0.0 wherever the completion mask is 0."""

    logprobs: FloatArray
    entropy: FloatArray | None
    temperature: float
    model: dict[str, Any]
    usage: dict[str, int]


def join(results: list[Result], call: Call) -> Result:
    """The answers to a call's parts, in order, as the answer to the call."""
    first = results[0]
    for other in results[1:]:
        check_same_model(first.model, other.model)

    def column(name: str) -> list[Any] | None:
        columns: list[list[Any] | None] = [getattr(result, name) for result in results]
        if all(items is None for items in columns):
            return None
        padded = (
            [None] * len(r.logprobs) if items is None else items for r, items in zip(results, columns, strict=True)
        )
        return call.nest([item for items in padded for item in items])

    return Result(
        logprobs=column("logprobs") or [],
        entropy=column("entropy"),
        top_ids=column("top_ids"),
        top_logprobs=column("top_logprobs"),
        candidate_logprobs=column("candidate_logprobs"),
        token_ids=column("token_ids"),
        temperature=first.temperature,
        model=first.model,
        usage=sum_usage(result.usage for result in results),
    )


def sum_usage(usages: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for usage in usages:
        total.update(usage)
    return dict(total)


def check_same_model(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Raise ModelMismatchError where two answers to one call cannot be used together."""
    for name in IDENTITY:
        if one.get(name) != other.get(name):
            raise ModelMismatchError(
                f"two requests of one call were answered by different models: "
                f"{name} {one.get(name)!r} and {other.get(name)!r}",
                status=409,
                code="model_mismatch",
                param=f"expect.{name}",
            )


def candidate_scores(flat: list[FloatArray], asked: list[Candidates] | None) -> list[Any]:
    """One completion's candidates each, from flat to the form in which their ids were given."""
    return [
        pieces(scores, candidates.lengths.tolist())
        if candidates.width is None
        else scores.reshape(len(candidates.lengths), candidates.width)
        for scores, candidates in zip(flat, asked or [], strict=True)
    ]
