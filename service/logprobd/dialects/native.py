"""`POST /logprobs`: from the wire to sequences, and from their outcomes to the reply.

Everything here may be slow for a large body, so it runs in a thread, never on the event loop.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from pydantic import ValidationError

from logprobd.errors import ApiError, field_path
from logprobd.messages import ModelInfo
from logprobd.schemas import Expect, Group, LogprobsRequest
from logprobd.sequences import Candidates, FloatArray, IntArray, Options, Outcome, Scores, Sequence
from logprobd.tokenizer import Tokenizer

LOWEST = np.finfo(np.float32).min  # what stands in JSON for a probability of zero


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is held against: the model, its tokenizer and the longest sequence."""

    info: ModelInfo
    tokenizer: Tokenizer | None
    max_sequence_tokens: int


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A group as sequences, its place in the request, and whether its tokens are spelled out in the reply."""

    place: tuple[int | str, ...]
    prompt: IntArray
    sequences: list[Sequence]
    spell_prompt: bool
    spell_completions: list[bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """A request ready to be scored."""

    request: LogprobsRequest
    groups: list[PlannedGroup]

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for group in self.groups for sequence in group.sequences]


def plan(body: bytes, served: ServedModel) -> Plan:
    """Parse and check a request's body; raises ApiError with the field's path."""
    request = parse(body)
    check_options(request, served.info)
    groups = []
    for number, group in enumerate(request.all_groups()):
        place: tuple[int | str, ...] = () if request.groups is None else ("groups", number)
        groups.append(plan_group(request, group, served, place))
    return Plan(request, groups)


def check_options(request: LogprobsRequest, info: ModelInfo) -> None:
    """Refuse what this model cannot be asked for, whatever the groups."""
    if request.expect is not None:
        check_expectation(request.expect, info)
    if request.top_logprobs > info.vocab_size:
        raise ApiError(
            "invalid",
            f"top_logprobs is {request.top_logprobs}; the vocabulary has {info.vocab_size} tokens",
            param="top_logprobs",
        )


def plan_group(
    request: LogprobsRequest, group: Group, served: ServedModel, place: tuple[int | str, ...] = ()
) -> PlannedGroup:
    """One group as sequences with the request's options; raises ApiError with the field's path."""
    options = Options(request.temperature, request.top_logprobs, request.entropy)
    return _GroupPlanner(served, options, request, place).plan(group)


def parse(body: bytes) -> LogprobsRequest:
    """JSON to a request, with one error for the first thing that is wrong."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed", f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError("invalid", "the body must be a JSON object with groups, or prompt and completions")
    try:
        return LogprobsRequest.model_validate(value)
    except ValidationError as error:
        raise invalid(error) from None


def group_of(prompt: object, completions: list[object]) -> Group:
    """A group out of values as JSON has them; raises ApiError for the first thing that is wrong."""
    try:
        return Group.model_validate({"prompt": prompt, "completions": completions})
    except ValidationError as error:
        raise invalid(error) from None


def invalid(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints as an error of ours."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = first.get("ctx", {}).get("place", [])
    path = (*first["loc"], *(place if isinstance(place, list) else [place]))
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return ApiError("invalid", f"{field_path(path) or 'body'}: {message}", param=field_path(path) or None)


def check_expectation(expect: Expect, info: ModelInfo) -> None:
    """Refuse to answer for another model than the caller relies on."""
    actual = {"model": info.id, "weights_version": info.weights_version, "fingerprint": info.fingerprint}
    for name, wanted in expect.model_dump(exclude_none=True).items():
        if wanted != actual[name]:
            raise ApiError(
                "model_mismatch", f"expected {name} {wanted!r}, serving {actual[name]!r}", param=f"expect.{name}"
            )


class _GroupPlanner:
    """Turns the groups of one request into sequences."""

    def __init__(
        self, served: ServedModel, options: Options, request: LogprobsRequest, place: tuple[int | str, ...]
    ) -> None:
        self._served, self._options, self._request, self._place = served, options, request, place

    def plan(self, group: Group) -> PlannedGroup:
        text = isinstance(group.prompt, str)
        prompt = self._encode_prompt(group.prompt)
        if not len(prompt):
            raise self._error(
                "invalid", "an empty prompt cannot score its first token; send at least a BOS token", "prompt"
            )
        candidates = self._candidates(group)
        sequences = []
        for number, (wire, asked) in enumerate(zip(group.completions, candidates, strict=True)):
            completion = self._encode_completion(group.prompt if text else None, wire, number)
            self._check_candidates(asked, completion, number)
            sequence = Sequence(prompt, completion, self._options, asked)
            self._check_length(sequence, number)
            sequences.append(sequence)
        spell = [self._request.tokens or isinstance(wire, str) for wire in group.completions]
        return PlannedGroup(self._place, prompt, sequences, text or self._request.tokens, spell)

    def _encode_prompt(self, prompt: str | IntArray) -> IntArray:
        if isinstance(prompt, str):
            return self._tokenizer("prompt").encode_prompt(prompt, add_special_tokens=self._request.add_special_tokens)
        self._check_ids(prompt, "prompt")
        return prompt

    def _encode_completion(self, prompt: str | None, wire: str | IntArray, number: int) -> IntArray:
        if isinstance(wire, str):
            return self._tokenizer("completions", number).encode_completion(prompt, wire)
        self._check_ids(wire, "completions", number)
        return wire

    def _candidates(self, group: Group) -> list[Candidates] | list[None]:
        if group.candidate_ids is None:
            return [None] * len(group.completions)
        if len(group.candidate_ids) != len(group.completions):
            raise self._error(
                "invalid",
                f"{len(group.candidate_ids)} lists for {len(group.completions)} completions; give one a completion",
                "candidate_ids",
            )
        return group.candidate_ids

    def _check_candidates(self, asked: Candidates | None, completion: IntArray, number: int) -> None:
        if asked is None:
            return
        if len(asked.lengths) != len(completion):
            raise self._error(
                "invalid",
                f"{len(asked.lengths)} lists for {len(completion)} tokens; give one a token",
                "candidate_ids",
                number,
            )
        if (bad := self._first_bad(asked.ids)) is not None:
            owners = np.repeat(np.arange(len(asked.lengths)), asked.lengths)
            token = int(owners[bad])
            within = bad - int(np.searchsorted(owners, token))
            raise self._bad_id(int(asked.ids[bad]), "candidate_ids", number, token, within)

    def _check_ids(self, ids: IntArray, *place: int | str) -> None:
        if (bad := self._first_bad(ids)) is not None:
            raise self._bad_id(int(ids[bad]), *place, bad)

    def _first_bad(self, ids: IntArray) -> int | None:
        if not len(ids) or int(ids.max()) < self._served.info.vocab_size:
            return None
        return int((ids >= self._served.info.vocab_size).argmax())

    def _bad_id(self, value: int, *place: int | str) -> ApiError:
        last = self._served.info.vocab_size - 1
        return self._error("invalid", f"token id {value} is not in the vocabulary (0 to {last})", *place)

    def _check_length(self, sequence: Sequence, number: int) -> None:
        limit = self._served.max_sequence_tokens
        if sequence.num_tokens > limit:
            raise self._error(
                "sequence_too_long",
                f"prompt and completion have {sequence.num_tokens} tokens; the limit is {limit}",
                "completions",
                number,
            )

    def _tokenizer(self, *place: int | str) -> Tokenizer:
        if self._served.tokenizer is None:
            raise self._error("invalid", "this model has no tokenizer here; send token ids", *place)
        return self._served.tokenizer

    def _error(self, code: str, message: str, *place: int | str) -> ApiError:
        return ApiError(code, message, param=field_path((*self._place, *place)))


def reply(plan: Plan, outcomes: list[Outcome], served: ServedModel) -> bytes:
    """The reply's JSON; raises ApiError if any sequence failed."""
    answers = iter(zip(places(plan), outcomes, strict=True))
    groups = []
    for group in plan.groups:
        completions = [
            completion_reply(plan.request, sequence, scores_or_raise(*next(answers)), spell, served.tokenizer)
            for sequence, spell in zip(group.sequences, group.spell_completions, strict=True)
        ]
        groups.append({"completions": completions, **spelled_prompt(group, served.tokenizer)})
    body = {
        "groups": groups,
        "temperature": plan.request.temperature,
        "model": identity(served.info),
        "usage": usage(plan, outcomes),
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def places(plan: Plan) -> Iterable[str]:
    """The field path of each completion, in order."""
    for group in plan.groups:
        for index in range(len(group.sequences)):
            yield field_path((*group.place, "completions", index))


def scores_or_raise(place: str, outcome: Outcome) -> Scores:
    if isinstance(outcome, Scores):
        return outcome
    raise ApiError(outcome.code, f"{place}: {outcome.message}", param=place)


def completion_reply(
    request: LogprobsRequest, sequence: Sequence, scores: Scores, spell: bool, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """One completion's answer: what was asked for, and nothing else."""
    if request.reduce == "sum":
        answer: dict[str, Any] = {"sum": finite(scores.logprobs.sum(dtype=np.float64, keepdims=True))[0]}
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
        answer["token_ids"] = sequence.completion
    if spell and tokenizer is not None:
        answer["tokens"] = tokenizer.token_strings(sequence.completion)
        if scores.top_ids is not None:
            answer["top_tokens"] = [tokenizer.token_strings(ids) for ids in scores.top_ids]
    return answer


def spelled_prompt(group: PlannedGroup, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if not group.spell_prompt:
        return {}
    strings = {} if tokenizer is None else {"prompt_tokens": tokenizer.token_strings(group.prompt)}
    return {"prompt_token_ids": group.prompt, **strings}


def finite(logprobs: FloatArray) -> FloatArray:
    """Logprobs for JSON, which knows no infinity: a probability of zero is float32's lowest number."""
    return np.maximum(logprobs, LOWEST).astype(np.float32)


def identity(info: ModelInfo) -> dict[str, Any]:
    """The served model as every reply names it."""
    return {
        "id": info.id,
        "fingerprint": info.fingerprint,
        "weights_version": info.weights_version,
        "precision": info.precision,
        "head_precision": info.head_precision,
        "vocab_size": info.vocab_size,
    }


def usage(plan: Plan, outcomes: list[Outcome]) -> dict[str, int]:
    """Prompt tokens count once a group; computed tokens are those that went through the model."""
    return {
        "prompt_tokens": sum(len(group.prompt) for group in plan.groups),
        "completion_tokens": sum(len(sequence.completion) for sequence in plan.sequences),
        "computed_tokens": sum(outcome.computed_tokens for outcome in outcomes if isinstance(outcome, Scores)),
    }
