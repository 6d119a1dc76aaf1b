"""What dialects share that score whole sequences: every token of a prompt but the first, given those before it.

A client of an engine that generates cannot ask for less than one token. Where it asks for it, the most likely next
token stands at the end: it is read off the distribution behind the prompt, nothing is generated.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from logprobd.dialects.native import LOWEST
from logprobd.dialects.plans import (
    Form,
    Plan,
    PlannedGroup,
    ServedModel,
    check_count,
    check_ids,
    check_length,
    check_prompt,
    place_of,
)
from logprobd.errors import ApiError, field_path
from logprobd.schemas import IDS_SCHEMA, parse_ids, parse_text_or_ids, refuse_boolean
from logprobd.sequences import IntArray, Options, Scores, Sequence
from logprobd.tokenizer import Tokenizer

NEXT = np.zeros(1, dtype=np.int32)  # stands where the next token is asked for: any id has the same distribution

Prompt = str | IntArray


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request, and how they came: one, or a list."""

    items: list[Prompt]
    form: Form


def parse_prompts(value: Any) -> Prompts:
    """Text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        items = []
        for place, item in enumerate(value):
            try:
                items.append(parse_text_or_ids(item))
            except PydanticCustomError as error:
                context = error.context or {}
                within = [context["place"]] if "place" in context else []
                raise PydanticCustomError(
                    "prompts", error.message_template, {**context, "place": [place, *within]}
                ) from None
        return Prompts(items, "prompts")
    return Prompts([parse_text_or_ids(value)], "prompt")


def same(value: Any, other: Any) -> bool:
    """Equal, and not merely as True equals 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


ANY: tuple[Any, ...] = ()  # an option that changes nothing, whatever it is

SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "seed": ANY,
    "ignore_eos": ANY,
    "skip_special_tokens": ANY,
    "spaces_between_special_tokens": ANY,
    "include_stop_str_in_output": ANY,
}


class Dialect(BaseModel):
    """A request in somebody else's words, of which `NEUTRAL` says what may be left unread.

    Those options of generation change nothing here at the values listed; at others they are refused with a reason.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True)

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def without_neutral(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, harmless in cls.NEUTRAL.items():
            if name in value and harmless and not any(same(value[name], one) for one in (None, *harmless)):
                raise PydanticCustomError(
                    "generation",
                    "{name} asks for generation; this service scores what is given ({harmless} would do)",
                    {"name": name, "harmless": " or ".join(map(str, harmless)), "place": name},
                )
        return {name: item for name, item in value.items() if name not in cls.NEUTRAL}


PromptsField = Annotated[
    Any,
    PlainValidator(parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                IDS_SCHEMA,
                {"type": "array", "items": IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
IdsField = Annotated[Any, PlainValidator(parse_ids), WithJsonSchema(IDS_SCHEMA)]
Temperature = (
    Annotated[
        float,
        BeforeValidator(refuse_boolean),
        Field(ge=0, allow_inf_nan=False, description="logits are divided by it; 0 (greedy) and null score at 1"),
    ]
    | None
)
AtMostOne = Annotated[int, Field(ge=0, le=1, description="0, or 1: then the most likely next token comes as well")]


def temperature_of(asked: float | None) -> float:
    """Clients that score say 0 and mean the model's own distribution."""
    return asked or 1.0


def check_model(asked: str | None, served: ServedModel) -> None:
    """A client that names another model than the served one must notice."""
    if asked not in (None, "", served.info.id, served.info.path):
        raise ApiError("invalid", f"model: {asked!r} is not served, {served.info.id!r} is", param="model")


@dataclass(frozen=True, slots=True)
class Whole:
    """How whole sequences are scored: from what place on, and with the next token or not."""

    options: Options
    generates: bool
    starts: list[int]  # tokens at the beginning of each prompt that are not scored, at least one


def encode(prompts: Prompts, served: ServedModel, *, add_special_tokens: bool = True) -> list[IntArray]:
    """The ids of all prompts, none of them empty."""
    encoded = []
    for number, prompt in enumerate(prompts.items):
        place = place_of(prompts.form, number)
        if isinstance(prompt, str):
            tokenizer = served.tokenizer_for(field_path(place))
            prompt = tokenizer.encode_prompt(prompt, add_special_tokens=add_special_tokens)
        check_prompt(prompt, place)
        check_ids(prompt, served.info, place)
        encoded.append(prompt)
    return encoded


def plan_whole(request: Any, form: Form, prompts: Seq[IntArray], whole: Whole, served: ServedModel) -> Plan:
    check_count(len(prompts), served)
    groups = []
    for number, (ids, start) in enumerate(zip(prompts, whole.starts, strict=True)):
        completion = np.concatenate([ids[start:], NEXT]) if whole.generates else ids[start:]
        sequence = Sequence(ids[:start], completion, whole.options)
        check_length(sequence.num_tokens, served, place_of(form, number))
        groups.append(PlannedGroup(ids[:start], [sequence], False, [False]))
    return Plan(request, groups, form)


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """One token with its logprob and rank, and those that are likelier; None where nothing comes before it."""

    id: int
    logprob: float | None
    rank: int | None
    top: list[tuple[int, float]]


def tokens_of(group: PlannedGroup, scores: Scores, *, generates: bool) -> tuple[list[Token], Token | None]:
    """The tokens from the last that is not scored on, and the next one where it was asked for."""
    sequence = group.sequences[0]
    ids = sequence.completion.tolist()
    logprobs = np.maximum(scores.logprobs, LOWEST).tolist()
    ranks = [None] * len(ids) if scores.ranks is None else scores.ranks.tolist()
    tops = tops_of(scores, len(ids))
    tokens = [Token(int(group.prompt[-1]), None, None, [])]
    tokens += [Token(*entry) for entry in zip(ids, logprobs, ranks, tops, strict=True)]
    if not generates:
        return tokens, None
    last = tokens.pop()
    best, logprob = last.top[0]
    return tokens, Token(best, logprob, 1, last.top)


def tops_of(scores: Scores, length: int) -> list[list[tuple[int, float]]]:
    if scores.top_ids is None or scores.top_logprobs is None:
        return [[] for _ in range(length)]
    logprobs = np.maximum(scores.top_logprobs, LOWEST).tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(scores.top_ids.tolist(), logprobs, strict=True)]


def by_id(token: Token, k: int, tokenizer: Tokenizer | None) -> dict[str, dict[str, Any]] | None:
    """vLLM's entry of `prompt_logprobs`: the token itself first, then the k most likely."""
    if token.logprob is None:
        return None
    entries = {token.id: (token.logprob, rank_of(token))}
    for place, (top, logprob) in enumerate(token.top[:k]):
        entries.setdefault(top, (logprob, place + 1))
    strings = [None] * len(entries) if tokenizer is None else tokenizer.token_strings(np.array(list(entries)))
    return {
        str(own): {"logprob": logprob, "rank": rank, "decoded_token": string}
        for (own, (logprob, rank)), string in zip(entries.items(), strings, strict=True)
    }


def rank_of(token: Token) -> int | None:
    """Its place among the most likely where it is one of them: equals have one rank, but different places."""
    return next((place + 1 for place, (top, _) in enumerate(token.top) if top == token.id), token.rank)
