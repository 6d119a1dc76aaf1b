"""A stand-in for the service behind httpx.MockTransport: it speaks both forms, and its numbers are made of the ids.

The logprob of id t, whatever the prompt, is -t/8, its entropy t/16, the j-th likeliest token is j with logprob -j,
and a candidate c has -c/8. Everything is exact in float32, so that a number in the wrong place is seen.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.numpy import load, save

SAFETENSORS = "application/vnd.safetensors"
MODEL = {
    "id": "echo",
    "fingerprint": "0" * 16,
    "weights_version": 0,
    "precision": "float32",
    "head_precision": "float32",
    "vocab_size": 1 << 20,
}
LOWEST = float(np.finfo(np.float32).min)
IMPOSSIBLE = 7  # the id whose probability is zero


Logprobs = Callable[[NDArray[np.int32]], NDArray[np.float32]]


def eighths(ids: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.where(ids == IMPOSSIBLE, -np.inf, ids / np.float32(-8)).astype(np.float32)


@dataclass
class Asked:
    """A request, read."""

    prompts: list[list[int]]
    completions: list[NDArray[np.int32]]
    completions_per_prompt: list[int]
    candidates: list[list[list[int]]] | None
    options: dict[str, Any]
    binary: bool


@dataclass
class Echo:
    """Answers, keeps what it was asked where that is wanted, and adds up the seconds that it took itself."""

    logprobs: Logprobs = eighths
    model: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    asked: list[Asked] = field(default_factory=list)
    keeps_asked: bool = True
    seconds: float = 0.0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        started = time.perf_counter()
        binary = request.headers["content-type"] == SAFETENSORS
        asked = read_binary(request.content) if binary else read_json(request.content)
        if self.keeps_asked:
            self.asked.append(asked)
        answer = (
            answer_binary(asked, self.logprobs, self.model) if binary else answer_json(asked, self.logprobs, self.model)
        )
        assert request.headers["accept"] == request.headers["content-type"]
        headers = {"Content-Type": request.headers["accept"]}
        response = httpx.Response(200, content=answer, headers=headers)
        self.seconds += time.perf_counter() - started
        return response


def read_json(content: bytes) -> Asked:
    body = json.loads(content)
    groups = body.pop("groups")
    return Asked(
        prompts=[group["prompt"] for group in groups],
        completions=[np.array(ids, dtype=np.int32) for group in groups for ids in group["completions"]],
        completions_per_prompt=[len(group["completions"]) for group in groups],
        candidates=[lists for group in groups for lists in group["candidate_ids"]]
        if groups and "candidate_ids" in groups[0]
        else None,
        options=body,
        binary=False,
    )


def read_binary(content: bytes) -> Asked:
    tensors = load(content)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size])["__metadata__"]
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"int32"}
    completions = cut(tensors["completion_ids"], tensors["completion_lengths"])
    candidates = None
    if "candidate_ids" in tensors:
        lists = iter(cut(tensors["candidate_ids"], tensors["candidate_lengths"]))
        candidates = [[next(lists).tolist() for _ in completion] for completion in completions]
        assert next(lists, None) is None
    return Asked(
        prompts=[ids.tolist() for ids in cut(tensors["prompt_ids"], tensors["prompt_lengths"])],
        completions=completions,
        completions_per_prompt=tensors["completions_per_prompt"].tolist(),
        candidates=candidates,
        options=json.loads(metadata["options"]),
        binary=True,
    )


def cut(flat: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths)
    assert len(flat) == lengths.sum()
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def rest_of(asked: Asked, model: dict[str, Any]) -> dict[str, Any]:
    tokens = sum(len(ids) for ids in asked.completions)
    usage = {"prompt_tokens": sum(map(len, asked.prompts)), "completion_tokens": tokens, "computed_tokens": tokens}
    return {"temperature": asked.options["temperature"], "model": model, "usage": usage}


def answer_binary(asked: Asked, logprobs: Logprobs, model: dict[str, Any]) -> bytes:
    flat = np.concatenate([np.zeros(0, dtype=np.int32), *asked.completions])
    k = asked.options["top_logprobs"]
    tensors: dict[str, NDArray[Any]] = {"lengths": np.array([len(ids) for ids in asked.completions], dtype=np.int32)}
    if asked.options["reduce"] == "sum":
        tensors["sums"] = np.array([logprobs(ids).sum() for ids in asked.completions], dtype=np.float32)
    else:
        tensors["logprobs"] = logprobs(flat)
    if asked.options["entropy"]:
        tensors["entropy"] = (flat / np.float32(16)).astype(np.float32)
    if k:
        tensors["top_ids"] = np.tile(np.arange(k, dtype=np.int32), (len(flat), 1))
        tensors["top_logprobs"] = -tensors["top_ids"].astype(np.float32)
    if asked.candidates is not None:
        ids = [one for lists in asked.candidates for token in lists for one in token]
        tensors["candidate_logprobs"] = logprobs(np.array(ids, dtype=np.int32))
    return save(tensors, {"reply": json.dumps(rest_of(asked, model))})


def answer_json(asked: Asked, logprobs: Logprobs, model: dict[str, Any]) -> bytes:
    left = iter([answer_completion(asked, logprobs, number) for number in range(len(asked.completions))])
    groups = [{"completions": [next(left) for _ in range(size)]} for size in asked.completions_per_prompt]
    return orjson.dumps({"groups": groups, **rest_of(asked, model)}, option=orjson.OPT_SERIALIZE_NUMPY)


def answer_completion(asked: Asked, logprobs: Logprobs, number: int) -> dict[str, Any]:
    ids, k = asked.completions[number], asked.options["top_logprobs"]
    if asked.options["reduce"] == "sum":
        answer: dict[str, Any] = {"sum": max(LOWEST, float(logprobs(ids).sum()))}
    else:
        answer = {"logprobs": np.maximum(logprobs(ids), LOWEST)}
    if asked.options["entropy"]:
        answer["entropy"] = (ids / np.float32(16)).astype(np.float32)
    if k:
        answer["top_ids"] = [list(range(k)) for _ in ids]
        answer["top_logprobs"] = [[-float(j) for j in range(k)] for _ in ids]
    if asked.candidates is not None:
        lists = [np.array(token, dtype=np.int32) for token in asked.candidates[number]]
        answer["candidate_logprobs"] = [np.maximum(logprobs(token), LOWEST) for token in lists]
    return answer
