"""`POST /v1/completions`: the scoring subset of OpenAI's and vLLM's API.

Replies as TRL's `VLLMClient.get_sequence_logprobs`, lm-evaluation-harness and the openai package read them.
"""

import time
import uuid
from collections.abc import Iterator
from itertools import accumulate
from typing import Annotated, Any, ClassVar

import numpy as np
import orjson
from pydantic import Field

from logprobd.dialects.native import parse
from logprobd.dialects.plans import Plan, ServedModel, scores_or_raise
from logprobd.dialects.whole import (
    ANY,
    SAMPLING,
    AtMostOne,
    Dialect,
    PromptsField,
    Temperature,
    Token,
    Whole,
    by_id,
    check_model,
    encode,
    plan_whole,
    temperature_of,
    tokens_of,
)
from logprobd.errors import ApiError
from logprobd.sequences import MAX_TOP_LOGPROBS, Options, Outcome
from logprobd.tokenizer import Tokenizer

TopK = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class CompletionsRequest(Dialect):
    """Scoring only: what asks for generation beyond the most likely next token is refused."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        **SAMPLING,
        "stream": (False,),
        "stream_options": ({},),
        "suffix": ("",),
        "user": ANY,
        "min_tokens": (0,),
        "use_beam_search": (False,),
        "return_token_ids": ANY,
        "return_tokens_as_token_ids": (False,),
        "request_id": ANY,
    }

    prompt: PromptsField
    model: str | None = None
    max_tokens: AtMostOne
    echo: Annotated[bool | None, Field(description="also the prompt: its text, and with logprobs its tokens")] = None
    logprobs: Annotated[TopK | None, Field(description="tokens and their logprobs, with so many likelier ones")] = None
    prompt_logprobs: Annotated[TopK | None, Field(description="vLLM's: logprobs of the prompt's tokens by id")] = None
    temperature: Temperature = None
    add_special_tokens: bool | None = None

    @property
    def k(self) -> int:
        """The most likely tokens that are needed at each place: at least the next one itself."""
        return max(self.max_tokens, self.logprobs or 0, self.prompt_logprobs or 0)


def plan(body: bytes, served: ServedModel) -> Plan:
    """Parse and check a body; raises ApiError with the field's path."""
    request = parse(body, CompletionsRequest)
    check_model(request.model, served)
    if request.logprobs is None and request.prompt_logprobs is None:
        raise ApiError(
            "invalid", "nothing to score: ask for echo with logprobs, or for prompt_logprobs", param="logprobs"
        )
    prompts = encode(request.prompt, served, add_special_tokens=request.add_special_tokens is not False)
    options = Options(
        temperature_of(request.temperature),
        min(request.k, served.info.vocab_size),
        ranks=request.prompt_logprobs is not None,
    )
    whole = Whole(options, generates=request.max_tokens == 1, starts=[1] * len(prompts))
    asked = request.model_copy(update={"prompt": None})
    return plan_whole(asked, request.prompt.form, prompts, whole, served)


def reply(plan: Plan, outcomes: list[Outcome], served: ServedModel) -> Iterator[bytes]:
    """A `text_completion` object, one choice a prompt, in order."""
    scores = scores_or_raise(plan, outcomes)
    request: CompletionsRequest = plan.request
    rest = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.info.id,
        "temperature": temperature_of(request.temperature),
        "usage": usage_of(plan, request.max_tokens, sum(score.computed_tokens for score in scores)),
    }
    yield orjson.dumps(rest)[:-1] + b',"choices":['
    for index, (group, score) in enumerate(zip(plan.groups, scores, strict=True)):
        tokens, following = tokens_of(group, score, generates=request.max_tokens == 1)
        choice = {"index": index, **choice_of(request, tokens, following, served.tokenizer)}
        yield (b"," if index else b"") + orjson.dumps(choice)
    yield b"]}"


def usage_of(plan: Plan, generated: int, computed: int) -> dict[str, int]:
    """OpenAI's usage, and `computed_tokens`: those that went through the model."""
    completion = generated * len(plan.groups)
    prompt = sum(sequence.num_tokens for sequence in plan.sequences) - completion
    total = prompt + completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "computed_tokens": computed,
    }


def choice_of(
    request: CompletionsRequest, tokens: list[Token], following: Token | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """One prompt's choice; `following` is the most likely next token."""
    shown = [*(tokens if request.echo else []), *([following] if following else [])]
    strings = strings_of([token.id for token in shown], tokenizer)
    choice: dict[str, Any] = {"text": "".join(strings), "finish_reason": "length", "stop_reason": None}
    choice["logprobs"] = None if request.logprobs is None else logprobs_of(shown, strings, request.logprobs, tokenizer)
    choice["prompt_token_ids"] = [token.id for token in tokens]
    choice["prompt_logprobs"] = None
    if request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = [by_id(token, request.prompt_logprobs, tokenizer) for token in tokens]
    return choice


def logprobs_of(tokens: list[Token], strings: list[str], k: int, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """OpenAI's `logprobs`; `text[text_offset[i]:]` begins with `tokens[i]`."""
    return {
        "tokens": strings,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [by_string(*pair, k, tokenizer) for pair in zip(tokens, strings, strict=True)],
        "text_offset": list(accumulate(map(len, strings), initial=0))[: len(strings)],
    }


def by_string(token: Token, string: str, k: int, tokenizer: Tokenizer | None) -> dict[str, float] | None:
    """The token itself and the k most likely, by their text; those whose text is another's already, by their id."""
    if token.logprob is None:
        return None
    top = [entry for entry in token.top[:k] if entry[0] != token.id]
    strings = strings_of([own for own, _ in top], tokenizer)
    entries = {string: token.logprob}
    for (own, logprob), text in zip(top, strings, strict=True):
        entries[f"token_id:{own}" if text in entries else text] = logprob
    return entries


def strings_of(ids: list[int], tokenizer: Tokenizer | None) -> list[str]:
    """Each token's text; without a tokenizer its id, as vLLM writes it."""
    if tokenizer is None:
        return [f"token_id:{token_id}" for token_id in ids]
    return tokenizer.token_strings(np.array(ids, dtype=np.int32))
