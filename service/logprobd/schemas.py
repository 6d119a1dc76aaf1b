"""The wire: what `POST /logprobs` takes and gives. Pydantic models, used nowhere else inside."""

from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from logprobd.sequences import MAX_CANDIDATES, MAX_TOP_LOGPROBS, Candidates, IntArray

_KINDS = {
    type(None): "null",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}


def parse_ids(value: Any) -> IntArray:
    """A list of token ids as an array. Plain loops over the list, in C: a body may hold millions."""
    if not isinstance(value, list):
        raise PydanticCustomError("ids", "expected a list of token ids, got {got}", {"got": kind_of(value)})
    if value and set(map(type, value)) != {int}:
        place = next(index for index, item in enumerate(value) if type(item) is not int)
        raise bad_id(place, value[place])
    if value and not 0 <= min(value) <= max(value) < 2**31:
        place = next(index for index, item in enumerate(value) if not 0 <= item < 2**31)
        raise bad_id(place, value[place])
    return np.array(value, dtype=np.int32)


def bad_id(place: int, value: Any) -> PydanticCustomError:
    got = str(value) if type(value) in (int, float) else kind_of(value)
    return PydanticCustomError(
        "id", "expected a token id (an integer, 0 or more), got {got}", {"got": got, "place": place}
    )


def parse_text_or_ids(value: Any) -> str | IntArray:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError(
            "text_or_ids", "expected text or a list of token ids, got {got}", {"got": kind_of(value)}
        )
    return parse_ids(value)


def parse_candidates(value: Any) -> Candidates:
    """One list of candidate ids a token, as one ragged array."""
    if not isinstance(value, list):
        raise PydanticCustomError("ids", "expected one list of ids a token, got {got}", {"got": kind_of(value)})
    lists = []
    for place, ids in enumerate(value):
        try:
            lists.append(parse_ids(ids))
        except PydanticCustomError as error:
            context = error.context or {}
            places = [place, *([context["place"]] if "place" in context else [])]
            raise PydanticCustomError("id", error.message_template, {**context, "place": places}) from None
        if len(lists[-1]) > MAX_CANDIDATES:
            raise PydanticCustomError(
                "candidates",
                "{got} candidates for a token; the limit is {limit}",
                {"got": len(lists[-1]), "limit": MAX_CANDIDATES, "place": place},
            )
    lengths = np.array([len(ids) for ids in lists], dtype=np.int32)
    return Candidates(np.concatenate([np.zeros(0, dtype=np.int32), *lists]), lengths)


def kind_of(value: Any) -> str:
    """A value's type in JSON's words."""
    return _KINDS[type(value)]


def refuse_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("boolean", "expected a number, got a boolean")
    return value


TextOrIds = Annotated[
    Any,
    PlainValidator(parse_text_or_ids),
    WithJsonSchema({"anyOf": [{"type": "string"}, IDS_SCHEMA], "description": "text, or a list of token ids"}),
]
CandidateIds = Annotated[Any, PlainValidator(parse_candidates), WithJsonSchema({"type": "array", "items": IDS_SCHEMA})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)


class Group(_Strict):
    """One prompt with its completions."""

    prompt: TextOrIds
    completions: list[TextOrIds]
    candidate_ids: Annotated[
        list[CandidateIds] | None, Field(description="one list a completion, one list a token: ids to score there")
    ] = None


class Expect(_Strict):
    """What the caller relies on; any mismatch is a 409."""

    model: str | None = None
    weights_version: int | None = None
    fingerprint: str | None = None


class LogprobsOptions(_Strict):
    """What to compute, for the whole request."""

    temperature: Annotated[
        float,
        BeforeValidator(refuse_boolean),
        Field(gt=0, allow_inf_nan=False, description="logits are divided by it"),
    ] = 1.0
    top_logprobs: Annotated[
        int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="also the k most likely tokens at each position")
    ] = 0
    entropy: Annotated[bool, Field(description="also the entropy (nats) of each position's distribution")] = False
    tokens: Annotated[bool, Field(description="also token ids and token strings; always given for text")] = False
    reduce: Annotated[str, Field(pattern="^(none|sum)$", description="none, or sum: one number a completion")] = "none"
    add_special_tokens: Annotated[bool, Field(description="text prompts: as the tokenizer does by default")] = True
    expect: Expect | None = None


class LogprobsRequest(LogprobsOptions):
    """Either `prompt` and `completions` (one group), or `groups`."""

    prompt: TextOrIds | None = None
    completions: list[TextOrIds] | None = None
    candidate_ids: Annotated[
        list[CandidateIds] | None, Field(description="beside `prompt`; in a group, beside its own prompt")
    ] = None
    groups: list[Group] | None = None

    @model_validator(mode="after")
    def one_form(self) -> Self:
        single = [name for name in ("prompt", "completions", "candidate_ids") if getattr(self, name) is not None]
        if self.groups is not None and single:
            raise PydanticCustomError("form", "give either groups, or prompt and completions, not both")
        if self.groups is None and (self.prompt is None or self.completions is None):
            raise PydanticCustomError("form", "give prompt and completions, or groups")
        return self

    def without_tokens(self) -> LogprobsOptions:
        """What a reply needs of the request."""
        fields = LogprobsOptions.model_fields
        return LogprobsOptions.model_construct(**{name: getattr(self, name) for name in fields})

    def all_groups(self) -> list[Group]:
        """The groups, whichever form they came in."""
        if self.groups is not None:
            return self.groups
        return [
            Group.model_construct(
                prompt=self.prompt, completions=self.completions or [], candidate_ids=self.candidate_ids
            )
        ]


class CompletionScores(BaseModel):
    """One completion's answer: one number a token, or `sum`."""

    logprobs: list[float] | None = None
    sum: float | None = None
    entropy: list[float] | None = None
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    top_tokens: list[list[str]] | None = None
    candidate_logprobs: list[list[float]] | None = None
    token_ids: list[int] | None = None
    tokens: list[str] | None = None


class GroupScores(BaseModel):
    completions: list[CompletionScores]
    prompt_token_ids: list[int] | None = None
    prompt_tokens: list[str] | None = None


class ModelIdentity(BaseModel):
    id: str
    fingerprint: str
    weights_version: int
    precision: str
    head_precision: str
    vocab_size: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    computed_tokens: int


class LogprobsReply(BaseModel):
    """The answer, in the order sent."""

    groups: list[GroupScores]
    temperature: float
    model: ModelIdentity
    usage: Usage


class ErrorDetail(BaseModel):
    code: str
    message: str
    param: str | None


class ErrorReply(BaseModel):
    error: ErrorDetail
