"""What every dialect turns a request's body into: groups of sequences, and what its reply needs to know."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

from logprobd.errors import ApiError, field_path
from logprobd.messages import ModelInfo
from logprobd.sequences import Candidates, IntArray, Outcome, Scores, Sequence
from logprobd.tokenizer import Tokenizer

Form = Literal["single", "groups", "prompt", "prompts"]
"""How a body names its sequences: `completions[3]`, `groups[0].completions[3]`, `prompt` or `prompt[3]`."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is held against: the model, its tokenizer and the largest things that it may ask for."""

    info: ModelInfo
    tokenizer: Tokenizer | None
    max_sequence_tokens: int
    max_request_sequences: int = 1 << 31

    def without_tokenizer(self) -> Self:
        return replace(self, tokenizer=None)

    def tokenizer_for(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError("invalid", "this model has no tokenizer here; send token ids", param=param)
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """A prompt with its sequences, and whether tokens are spelled out in the reply."""

    prompt: IntArray
    sequences: list[Sequence]
    spell_prompt: bool
    spell_completions: list[bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """A request ready to be scored; `request` is what its dialect's reply needs of it, without the tokens."""

    request: Any
    groups: list[PlannedGroup]
    form: Form

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for group in self.groups for sequence in group.sequences]


def place_of(form: Form, group: int, completion: int | None = None) -> tuple[int | str, ...]:
    """Where a group, or one of its completions, stands in the body."""
    if form in ("prompt", "prompts"):
        return ("prompt",) if form == "prompt" else ("prompt", group)
    own: tuple[int | str, ...] = () if completion is None else ("completions", completion)
    return own if form == "single" else ("groups", group, *own)


def places(plan: Plan) -> Iterable[tuple[int | str, ...]]:
    """Where each completion stands in the body, in order."""
    for number, group in enumerate(plan.groups):
        for index in range(len(group.sequences)):
            yield place_of(plan.form, number, index)


def scores_or_raise(plan: Plan, outcomes: list[Outcome]) -> list[Scores]:
    """The scores of all sequences; raises ApiError for the first that has none."""
    scores = []
    for place, outcome in zip(places(plan), outcomes, strict=True):
        if not isinstance(outcome, Scores):
            path = field_path(place)
            raise ApiError(outcome.code, f"{path}: {outcome.message}", param=path)
        scores.append(outcome)
    return scores


def check_ids(ids: IntArray, info: ModelInfo, place: tuple[int | str, ...]) -> None:
    """Every id is one of the model's vocabulary, which may be larger than the tokenizer's."""
    if len(ids) and int(ids.max()) >= info.vocab_size:
        bad = int((ids >= info.vocab_size).argmax())
        raise unknown_id(int(ids[bad]), info, (*place, bad))


def unknown_id(value: int, info: ModelInfo, place: tuple[int | str, ...]) -> ApiError:
    return ApiError(
        "invalid", f"token id {value} is not in the vocabulary (0 to {info.vocab_size - 1})", param=field_path(place)
    )


def check_candidates(asked: Candidates, completion: IntArray, info: ModelInfo, place: tuple[int | str, ...]) -> None:
    """One list a completion token, all of the vocabulary."""
    if len(asked.lengths) != len(completion):
        raise ApiError(
            "invalid",
            f"{len(asked.lengths)} lists for {len(completion)} tokens; give one a token",
            param=field_path(place),
        )
    if len(asked.ids) and int(asked.ids.max()) >= info.vocab_size:
        bad = int((asked.ids >= info.vocab_size).argmax())
        owners = np.repeat(np.arange(len(asked.lengths)), asked.lengths)
        token = int(owners[bad])
        raise unknown_id(int(asked.ids[bad]), info, (*place, token, bad - int(np.searchsorted(owners, token))))


def check_prompt(prompt: IntArray, place: tuple[int | str, ...]) -> None:
    if not len(prompt):
        raise ApiError(
            "invalid",
            "an empty prompt cannot score its first token; send at least a BOS token",
            param=field_path(place),
        )


def check_length(num_tokens: int, served: ServedModel, place: tuple[int | str, ...]) -> None:
    if num_tokens > served.max_sequence_tokens:
        raise ApiError(
            "sequence_too_long",
            f"prompt and completion have {num_tokens} tokens; the limit is {served.max_sequence_tokens}",
            param=field_path(place),
        )


def check_count(num_sequences: int, served: ServedModel) -> None:
    if num_sequences > served.max_request_sequences:
        raise ApiError(
            "request_too_large",
            f"the request has {num_sequences} sequences; the limit is {served.max_request_sequences}; send it in parts",
        )


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


def usage(plan: Plan, scores: list[Scores]) -> dict[str, int]:
    """Prompt tokens count once a group; computed tokens are those that went through the model."""
    return {
        "prompt_tokens": sum(len(group.prompt) for group in plan.groups),
        "completion_tokens": sum(len(score.logprobs) for score in scores),
        "computed_tokens": sum(score.computed_tokens for score in scores),
    }
