"""`POST /logprobs` in JSON: from the wire to sequences, and from their outcomes to the reply.

Everything here may be slow for a large body, so it runs in a thread or in a process of its own, never on the event
loop.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from logprobd.dialects.plans import (
    Form,
    Plan,
    PlannedGroup,
    ServedModel,
    check_candidates,
    check_count,
    check_ids,
    check_length,
    check_prompt,
    identity,
    place_of,
    scores_or_raise,
    usage,
)
from logprobd.errors import ApiError, field_path
from logprobd.messages import ModelInfo
from logprobd.schemas import Expect, Group, LogprobsOptions, LogprobsRequest
from logprobd.sequences import Candidates, FloatArray, IntArray, Options, Outcome, Scores, Sequence
from logprobd.tokenizer import Tokenizer

T = TypeVar("T", bound=BaseModel)

LOWEST = np.finfo(np.float32).min  # what stands in JSON for a probability of zero


def plan(body: bytes, served: ServedModel) -> Plan:
    """Parse and check a request's body; raises ApiError with the field's path."""
    request = parse(body, LogprobsRequest)
    options = options_of(request, served)
    form: Form = "single" if request.groups is None else "groups"
    groups = request.all_groups()
    check_count(sum(len(group.completions) for group in groups), served)
    planned = [_GroupPlanner(served, options, request, form, number).plan(g) for number, g in enumerate(groups)]
    return Plan(request.without_tokens(), planned, form)


def parse(body: bytes, schema: type[T]) -> T:
    """JSON to a request, with one error for the first thing that is wrong."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError("invalid", "the body must be a JSON object")
    return checked(value, schema)


def checked(value: dict[str, Any], schema: type[T]) -> T:
    """An object as a request; raises ApiError for the first thing that is wrong."""
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints as an error of ours."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = first.get("ctx", {}).get("place", [])
    path = (*first["loc"], *(place if isinstance(place, list) else [place]))
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return ApiError("invalid", f"{field_path(path) or 'body'}: {message}", param=field_path(path) or None)


def group_of(prompt: object, completions: list[object]) -> Group:
    """A group out of values as JSON has them; raises ApiError for the first thing that is wrong."""
    return checked({"prompt": prompt, "completions": completions}, Group)


def plan_group(request: LogprobsRequest, group: Group, served: ServedModel) -> PlannedGroup:
    """One group as sequences with the request's options; raises ApiError with the field's path."""
    return _GroupPlanner(served, options_of(request, served), request, "single", 0).plan(group)


def options_of(request: LogprobsOptions, served: ServedModel) -> Options:
    """What to compute; raises ApiError if the served model is another, or cannot."""
    if request.expect is not None:
        check_expectation(request.expect, served.info)
    if request.top_logprobs > served.info.vocab_size:
        raise ApiError(
            "invalid",
            f"top_logprobs is {request.top_logprobs}; the vocabulary has {served.info.vocab_size} tokens",
            param="top_logprobs",
        )
    return Options(request.temperature, request.top_logprobs, request.entropy)


def check_expectation(expect: Expect, info: ModelInfo) -> None:
    """Refuse to answer for another model than the caller relies on."""
    actual = {"model": info.id, "weights_version": info.weights_version, "fingerprint": info.fingerprint}
    for name, wanted in expect.model_dump(exclude_none=True).items():
        if wanted != actual[name]:
            raise ApiError(
                "model_mismatch", f"expected {name} {wanted!r}, serving {actual[name]!r}", param=f"expect.{name}"
            )


class _GroupPlanner:
    """Turns one group of a request into sequences."""

    def __init__(
        self, served: ServedModel, options: Options, request: LogprobsRequest, form: Form, number: int
    ) -> None:
        self._served, self._options, self._request = served, options, request
        self._form: Form = form
        self._number = number

    def plan(self, group: Group) -> PlannedGroup:
        text = isinstance(group.prompt, str)
        prompt = self._encode_prompt(group.prompt)
        check_prompt(prompt, self._place("prompt"))
        sequences = []
        for number, (wire, asked) in enumerate(zip(group.completions, self._candidates(group), strict=True)):
            completion = self._encode_completion(group.prompt if text else None, wire, number)
            if asked is not None:
                check_candidates(asked, completion, self._served.info, self._place("candidate_ids", number))
            sequences.append(Sequence(prompt, completion, self._options, asked))
            check_length(sequences[-1].num_tokens, self._served, self._place("completions", number))
        spell = [self._request.tokens or isinstance(wire, str) for wire in group.completions]
        return PlannedGroup(prompt, sequences, text or self._request.tokens, spell)

    def _encode_prompt(self, prompt: str | IntArray) -> IntArray:
        if isinstance(prompt, str):
            tokenizer = self._served.tokenizer_for(field_path(self._place("prompt")))
            return tokenizer.encode_prompt(prompt, add_special_tokens=self._request.add_special_tokens)
        check_ids(prompt, self._served.info, self._place("prompt"))
        return prompt

    def _encode_completion(self, prompt: str | None, wire: str | IntArray, number: int) -> IntArray:
        place = self._place("completions", number)
        if isinstance(wire, str):
            return self._served.tokenizer_for(field_path(place)).encode_completion(prompt, wire)
        check_ids(wire, self._served.info, place)
        return wire

    def _candidates(self, group: Group) -> list[Candidates] | list[None]:
        if group.candidate_ids is None:
            return [None] * len(group.completions)
        if len(group.candidate_ids) != len(group.completions):
            raise ApiError(
                "invalid",
                f"{len(group.candidate_ids)} lists for {len(group.completions)} completions; give one a completion",
                param=field_path(self._place("candidate_ids")),
            )
        return group.candidate_ids

    def _place(self, *within: int | str) -> tuple[int | str, ...]:
        return (*place_of(self._form, self._number), *within)


def reply(plan: Plan, outcomes: list[Outcome], served: ServedModel) -> Iterator[bytes]:
    """The reply's JSON in pieces, a group at a time; raises ApiError, before the first, if any sequence failed."""
    scores = scores_or_raise(plan, outcomes)
    return pieces_of_reply(plan, scores, served)


def pieces_of_reply(plan: Plan, scores: list[Scores], served: ServedModel) -> Iterator[bytes]:
    remaining = iter(scores)
    yield b'{"groups":['
    for number, group in enumerate(plan.groups):
        completions = [
            completion_reply(plan.request, sequence, next(remaining), spell, served.tokenizer)
            for sequence, spell in zip(group.sequences, group.spell_completions, strict=True)
        ]
        body = {"completions": completions, **spelled_prompt(group, served.tokenizer)}
        yield (b"," if number else b"") + orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    yield b"]," + orjson.dumps(rest_of_reply(plan, scores, served.info))[1:]


def rest_of_reply(plan: Plan, scores: list[Scores], info: ModelInfo) -> dict[str, Any]:
    """What a reply says beside the numbers."""
    return {"temperature": plan.request.temperature, "model": identity(info), "usage": usage(plan, scores)}


def completion_reply(
    request: LogprobsOptions, sequence: Sequence, scores: Scores, spell: bool, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """One completion's answer: what was asked for, and nothing else."""
    if request.reduce == "sum":
        answer: dict[str, Any] = {"sum": finite(sum_of(scores))[0]}
    else:
        answer = {"logprobs": finite(scores.logprobs)}
    if scores.entropy is not None:
        answer["entropy"] = np.ascontiguousarray(scores.entropy)
    if scores.top_ids is not None and scores.top_logprobs is not None:
        answer["top_ids"] = np.ascontiguousarray(scores.top_ids)
        answer["top_logprobs"] = finite(scores.top_logprobs)
    if scores.candidate_logprobs is not None and sequence.candidates is not None:
        lengths = sequence.candidates.lengths
        # Cutting nothing into no pieces would give one.
        pieces = np.split(finite(scores.candidate_logprobs), np.cumsum(lengths)[:-1])[: len(lengths)]
        answer["candidate_logprobs"] = pieces
    if spell:
        answer["token_ids"] = np.ascontiguousarray(sequence.completion)
    if spell and tokenizer is not None:
        answer["tokens"] = tokenizer.token_strings(sequence.completion)
        if scores.top_ids is not None:
            answer["top_tokens"] = [tokenizer.token_strings(ids) for ids in scores.top_ids]
    return answer


def spelled_prompt(group: PlannedGroup, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if not group.spell_prompt:
        return {}
    strings = {} if tokenizer is None else {"prompt_tokens": tokenizer.token_strings(group.prompt)}
    return {"prompt_token_ids": np.ascontiguousarray(group.prompt), **strings}


def sum_of(scores: Scores) -> FloatArray:
    """A completion's logprob (1,), summed in float64."""
    total: FloatArray = scores.logprobs.sum(dtype=np.float64, keepdims=True).astype(np.float32)
    return total


def finite(logprobs: FloatArray) -> FloatArray:
    """Logprobs for JSON, which knows no infinity: a probability of zero is float32's lowest number."""
    return np.maximum(logprobs, LOWEST).astype(np.float32)
