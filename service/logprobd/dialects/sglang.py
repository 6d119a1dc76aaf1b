"""`POST /generate`: the scoring subset of SGLang's native route, as AReaL and slime read it."""

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
import orjson
from pydantic import Field

from logprobd.dialects.native import parse
from logprobd.dialects.plans import Plan, PlannedGroup, ServedModel, place_of, scores_or_raise
from logprobd.dialects.whole import (
    ANY,
    SAMPLING,
    AtMostOne,
    Dialect,
    PromptsField,
    Temperature,
    Token,
    Whole,
    encode,
    plan_whole,
    temperature_of,
    tokens_of,
)
from logprobd.errors import ApiError, field_path
from logprobd.sequences import MAX_TOP_LOGPROBS, IntArray, Options, Outcome, Scores
from logprobd.tokenizer import Tokenizer


class SamplingParams(Dialect):
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SAMPLING,
        "min_new_tokens": (0,),
        "no_stop_trim": ANY,
    }

    max_new_tokens: AtMostOne
    temperature: Temperature = None


class SglangRequest(Dialect):
    """Either `input_ids` or `text`, one or a list. Scoring only: what asks for generation is refused."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "stream": (False,),
        "rid": ANY,
        "log_metrics": ANY,
        "logprob_ratio": ANY,
        "return_hidden_states": (False,),
        "priority": ANY,
    }

    text: PromptsField = None
    input_ids: PromptsField = None
    sampling_params: SamplingParams
    return_logprob: Annotated[bool, Field(description="true: without it nothing is scored")]
    logprob_start_len: Annotated[
        int | None,
        Field(ge=-1, description="the place of the first token listed, itself without a logprob; -1: the last"),
    ] = None
    top_logprobs_num: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    return_text_in_logprobs: bool | None = None


def plan(body: bytes, served: ServedModel) -> Plan:
    """Parse and check a body; raises ApiError with the field's path."""
    request = parse(body, SglangRequest)
    if (request.text is None) == (request.input_ids is None):
        raise ApiError("invalid", "give either input_ids or text", param="input_ids")
    if not request.return_logprob:
        raise ApiError("invalid", "return_logprob: this service only scores; it must be true", param="return_logprob")
    given = request.input_ids if request.text is None else request.text
    prompts = encode(given, served)
    sampling, k = request.sampling_params, request.top_logprobs_num or 0
    generates = sampling.max_new_tokens == 1
    options = Options(temperature_of(sampling.temperature), min(max(k, int(generates)), served.info.vocab_size))
    starts = [first_scored(request, ids, field_path(place_of(given.form, n))) for n, ids in enumerate(prompts)]
    return plan_whole(
        request.model_copy(update={"text": None, "input_ids": None}),
        given.form,
        prompts,
        Whole(options, generates, starts),
        served,
    )


def first_scored(request: SglangRequest, ids: IntArray, place: str) -> int:
    """The place of the first token with a logprob: that behind `logprob_start_len`."""
    start = -1 if request.logprob_start_len is None else request.logprob_start_len
    if start >= len(ids):
        raise ApiError(
            "invalid", f"logprob_start_len is {start}; {place} has {len(ids)} tokens", param="logprob_start_len"
        )
    return len(ids) if start == -1 else start + 1


def reply(plan: Plan, outcomes: list[Outcome], served: ServedModel) -> Iterator[bytes]:
    """SGLang's object with `meta_info`, or a list of them for a list of prompts."""
    scores = scores_or_raise(plan, outcomes)
    many = plan.form == "prompts"
    yield b"[" if many else b""
    for index, (group, score) in enumerate(zip(plan.groups, scores, strict=True)):
        yield (b"," if index else b"") + orjson.dumps(item_of(plan.request, group, score, served))
    yield b"]" if many else b""


def item_of(request: SglangRequest, group: PlannedGroup, scores: Scores, served: ServedModel) -> dict[str, Any]:
    generates = request.sampling_params.max_new_tokens == 1
    tokens, following = tokens_of(group, scores, generates=generates)
    output = [following] if following else []
    strings = Strings(served.tokenizer, asked=bool(request.return_text_in_logprobs))
    meta: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "finish_reason": {"type": "length", "length": len(output)},
        "prompt_tokens": group.sequences[0].num_tokens - len(output),
        "completion_tokens": len(output),
        "cached_tokens": 0,
        "temperature": temperature_of(request.sampling_params.temperature),
        "input_token_logprobs": [strings.triple(token.logprob, token.id) for token in tokens],
        "output_token_logprobs": [strings.triple(token.logprob, token.id) for token in output],
    }
    if k := request.top_logprobs_num:
        meta["input_top_logprobs"] = [strings.top(token, k) for token in tokens]
        meta["output_top_logprobs"] = [strings.top(token, k) for token in output]
    ids = [token.id for token in output]
    text = "" if served.tokenizer is None else "".join(served.tokenizer.token_strings(np.array(ids, dtype=np.int32)))
    return {"text": text, "output_ids": ids, "meta_info": meta}


class Strings:
    """SGLang's triples: logprob, id, and the token's text if asked for."""

    def __init__(self, tokenizer: Tokenizer | None, *, asked: bool) -> None:
        self._tokenizer = tokenizer if asked else None

    def triple(self, logprob: float | None, token_id: int) -> tuple[float | None, int, str | None]:
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.token_strings(np.array([token_id], dtype=np.int32))[0]
        return logprob, token_id, text

    def top(self, token: Token, k: int) -> list[tuple[float | None, int, str | None]] | None:
        if token.logprob is None:
            return None
        return [self.triple(logprob, token_id) for token_id, logprob in token.top[:k]]
