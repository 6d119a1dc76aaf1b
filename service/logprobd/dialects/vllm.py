"""`POST /inference/v1/generate`: the scoring subset of vLLM's route for token ids, as prime-rl reads it."""

import uuid
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field

from logprobd.dialects.native import parse
from logprobd.dialects.plans import Plan, ServedModel, scores_or_raise
from logprobd.dialects.whole import (
    ANY,
    SAMPLING,
    AtMostOne,
    Dialect,
    IdsField,
    Prompts,
    Temperature,
    Whole,
    by_id,
    check_model,
    encode,
    plan_whole,
    temperature_of,
    tokens_of,
)
from logprobd.sequences import MAX_TOP_LOGPROBS, Options, Outcome


class SamplingParams(Dialect):
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SAMPLING,
        "min_tokens": (0,),
        "detokenize": ANY,
        "logprobs": (0,),
        "output_kind": ANY,
    }

    max_tokens: AtMostOne
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS, description="likelier tokens beside each own")]
    temperature: Temperature = None


class GenerateRequest(Dialect):
    """Scoring only: what asks for generation beyond the most likely next token is refused."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "stream": (False,),
        "stream_options": ({},),
        "request_id": ANY,
        "priority": ANY,
        "cache_salt": ANY,
    }

    token_ids: IdsField
    sampling_params: SamplingParams
    model: str | None = None


def plan(body: bytes, served: ServedModel) -> Plan:
    """Parse and check a body; raises ApiError with the field's path."""
    request = parse(body, GenerateRequest)
    check_model(request.model, served)
    prompts = encode(Prompts([request.token_ids], "prompt"), served)
    sampling = request.sampling_params
    k = min(max(sampling.max_tokens, sampling.prompt_logprobs), served.info.vocab_size)
    options = Options(temperature_of(sampling.temperature), k, ranks=True)
    whole = Whole(options, generates=sampling.max_tokens == 1, starts=[1])
    return plan_whole(sampling, "prompt", prompts, whole, served)


def reply(plan: Plan, outcomes: list[Outcome], served: ServedModel) -> Iterator[bytes]:
    """vLLM's GenerateResponse: `prompt_logprobs` beside the choices, the token itself first in each entry."""
    scores = scores_or_raise(plan, outcomes)
    sampling: SamplingParams = plan.request
    tokens, following = tokens_of(plan.groups[0], scores[0], generates=sampling.max_tokens == 1)
    choice = {
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
        "token_ids": [following.id] if following else [],
    }
    body = {
        "request_id": uuid.uuid4().hex,
        "choices": [choice],
        "prompt_logprobs": [by_id(token, sampling.prompt_logprobs, served.tokenizer) for token in tokens],
        "model": served.info.id,
        "temperature": temperature_of(sampling.temperature),
    }
    yield orjson.dumps(body)
