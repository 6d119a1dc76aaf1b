"""Routes that speak as other servers do, for clients that people already have."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from logprobd.dialects import completions, sglang, vllm
from logprobd.dialects.completions import CompletionsRequest
from logprobd.dialects.sglang import SglangRequest
from logprobd.dialects.vllm import GenerateRequest
from logprobd.dialects.whole import Dialect
from logprobd.responses import json_response
from logprobd.scoring import JSON, answer, require, service_of

router = APIRouter(tags=["as other servers"])

REQUESTS: tuple[type[Dialect], ...] = (CompletionsRequest, GenerateRequest, SglangRequest)


def body_of(schema: type[Dialect]) -> dict[str, Any]:
    content = {JSON: {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The served model, as OpenAI's clients list it."""
    served = service_of(request).served
    model = {
        "id": served.info.id,
        "object": "model",
        "created": 0,
        "owned_by": "logprobd",
        "root": served.info.path,
        "max_model_len": served.max_sequence_tokens,
    }
    return json_response({"object": "list", "data": [model]})


@router.post("/v1/completions", openapi_extra=body_of(CompletionsRequest))
async def v1_completions(request: Request) -> Response:
    """OpenAI's and vLLM's completions, for scoring: echo with logprobs, or prompt_logprobs."""
    require(request, JSON)
    return await answer(request, "completions", completions.reply)


@router.post("/inference/v1/generate", openapi_extra=body_of(GenerateRequest))
async def inference_v1_generate(request: Request) -> Response:
    """vLLM's route for token ids, for scoring: prompt_logprobs."""
    require(request, JSON)
    return await answer(request, "vllm", vllm.reply)


@router.post("/generate", openapi_extra=body_of(SglangRequest))
async def generate(request: Request) -> Response:
    """SGLang's route, for scoring: return_logprob."""
    require(request, JSON)
    return await answer(request, "sglang", sglang.reply)
