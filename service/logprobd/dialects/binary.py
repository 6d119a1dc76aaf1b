"""`POST /logprobs` in safetensors: a few tensors for all sequences instead of lists of numbers.

In: int32 `prompt_ids`, `prompt_lengths`, `completion_ids`, `completion_lengths`, `completions_per_prompt`, and for
candidates `candidate_ids` and `candidate_lengths` (one a completion token), with the options as JSON in the metadata
key `options`. Out: see `reply`.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from logprobd.dialects.flat import FlatCandidates, FlatPlan, unflatten
from logprobd.dialects.native import checked, options_of, rest_of_reply, sum_of
from logprobd.dialects.plans import (
    Plan,
    ServedModel,
    check_candidates,
    check_count,
    check_ids,
    check_length,
    check_prompt,
    place_of,
    scores_or_raise,
)
from logprobd.errors import ApiError
from logprobd.schemas import LogprobsOptions
from logprobd.sequences import MAX_CANDIDATES, Outcome, Scores

NEEDED = ("prompt_ids", "prompt_lengths", "completion_ids", "completion_lengths", "completions_per_prompt")
CANDIDATES = ("candidate_ids", "candidate_lengths")
LENGTHS = {
    "prompt_lengths": "prompt_ids",
    "completion_lengths": "completion_ids",
    "candidate_lengths": "candidate_ids",
}
HEADER_BYTES = 8  # its length, little-endian, before safetensors' JSON header

Tensors = dict[str, NDArray[Any]]


def plan(body: bytes, served: ServedModel) -> Plan:
    """Parse and check a body; raises ApiError with the tensor's name or the sequence's path."""
    tensors = read(body)
    request = read_options(body)
    if request.tokens:
        raise ApiError("invalid", "tokens: token strings come in JSON only", param="tokens")
    options = options_of(request, served)
    check_shapes(tensors)
    check_count(len(tensors["completion_lengths"]), served)
    nothing = np.zeros(len(tensors["completion_lengths"]), dtype=bool)
    candidates = None
    if CANDIDATES[0] in tensors:
        candidates = FlatCandidates(tensors[CANDIDATES[0]], tensors[CANDIDATES[1]], ~nothing)
    spelled = np.zeros(len(tensors["prompt_lengths"]), dtype=bool)
    flat = FlatPlan(
        request=request,
        form="groups",
        options=options,
        prompt_ids=tensors["prompt_ids"],
        prompt_lengths=tensors["prompt_lengths"],
        completions_per_prompt=tensors["completions_per_prompt"],
        completion_ids=tensors["completion_ids"],
        completion_lengths=tensors["completion_lengths"],
        spell_prompts=spelled,
        spell_completions=nothing,
        candidates=candidates,
    )
    planned = unflatten(flat)
    check(planned, served)
    return planned


def read(body: bytes) -> Tensors:
    """The tensors, each a list of integers that fit into 32 bits."""
    try:
        tensors: Tensors = safetensors.numpy.load(body)
    except (SafetensorError, KeyError, ValueError, TypeError) as error:  # KeyError: a type that numpy lacks
        raise ApiError("malformed", f"the body is not safetensors: {error}") from None
    for name in NEEDED:
        if name not in tensors:
            raise ApiError("invalid", f"the tensor {name} is missing", param=name)
    for name, tensor in tensors.items():
        if name not in NEEDED + CANDIDATES:
            raise ApiError("invalid", f"unknown tensor {name!r}", param=name)
        if tensor.dtype != np.int32 or tensor.ndim != 1:
            raise ApiError(
                "invalid", f"{name} must be int32 of one dimension, got {tensor.dtype} {tensor.shape}", param=name
            )
        if len(tensor) and int(tensor.min()) < 0:
            place = int((tensor < 0).argmax())
            raise ApiError(
                "invalid", f"{name}[{place}] is {tensor[place]}; it must be 0 or more", param=f"{name}[{place}]"
            )
    if (CANDIDATES[0] in tensors) != (CANDIDATES[1] in tensors):
        raise ApiError("invalid", "candidate_ids and candidate_lengths come together", param=CANDIDATES[0])
    return tensors


def read_options(body: bytes) -> LogprobsOptions:
    """The metadata's `options`; the defaults where there are none."""
    header = orjson.loads(body[HEADER_BYTES : HEADER_BYTES + int.from_bytes(body[:HEADER_BYTES], "little")])
    text = header.get("__metadata__", {}).get("options", "{}")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed", f"the metadata's options are not JSON: {error}", param="options") from None
    if not isinstance(value, dict):
        raise ApiError("invalid", "the metadata's options must be a JSON object", param="options")
    return checked(value, LogprobsOptions)


def check_shapes(tensors: Tensors) -> None:
    """Lengths add up to what they cut."""
    for lengths, ids in LENGTHS.items():
        if lengths in tensors and int(tensors[lengths].sum(dtype=np.int64)) != len(tensors[ids]):
            total = int(tensors[lengths].sum(dtype=np.int64))
            raise ApiError("invalid", f"{lengths} add up to {total}; {ids} has {len(tensors[ids])}", param=lengths)
    if CANDIDATES[1] in tensors and int(tensors[CANDIDATES[1]].max(initial=0)) > MAX_CANDIDATES:
        most = int(tensors[CANDIDATES[1]].max())
        raise ApiError("invalid", f"{most} candidates for a token; the limit is {MAX_CANDIDATES}", param=CANDIDATES[1])
    check_same(
        "completions_per_prompt", len(tensors["completions_per_prompt"]), "prompts", len(tensors["prompt_lengths"])
    )
    total = int(tensors["completions_per_prompt"].sum(dtype=np.int64))
    check_same("completions_per_prompt", total, "completions", len(tensors["completion_lengths"]))
    if CANDIDATES[1] in tensors:
        check_same(CANDIDATES[1], len(tensors[CANDIDATES[1]]), "completion tokens", len(tensors["completion_ids"]))


def check_same(name: str, count: int, of: str, expected: int) -> None:
    if count != expected:
        raise ApiError("invalid", f"{name} tells of {count}; there are {expected} {of}", param=name)


def check(planned: Plan, served: ServedModel) -> None:
    """What JSON is checked for too, with the same paths."""
    for number, group in enumerate(planned.groups):
        place = place_of(planned.form, number)
        check_prompt(group.prompt, (*place, "prompt"))
        check_ids(group.prompt, served.info, (*place, "prompt"))
        for index, sequence in enumerate(group.sequences):
            check_ids(sequence.completion, served.info, (*place, "completions", index))
            if sequence.candidates is not None:
                where = (*place, "candidate_ids", index)
                check_candidates(sequence.candidates, sequence.completion, served.info, where)
            check_length(sequence.num_tokens, served, (*place, "completions", index))


def reply(plan: Plan, outcomes: list[Outcome], served: ServedModel) -> Iterator[bytes]:
    """float32 `logprobs` (flat) and int32 `lengths`, or `sums` (one a completion); what else was asked for.

    Shapes over all n completion tokens: `entropy` (n,), `top_ids` and `top_logprobs` (n, k), `candidate_logprobs`
    (flat). Everything else is JSON in the metadata key `reply`. A probability of zero is -inf.
    """
    scores = scores_or_raise(plan, outcomes)
    metadata = {"reply": orjson.dumps(rest_of_reply(plan, scores, served.info)).decode()}
    yield safetensors.numpy.save(tensors_of(plan.request, scores), metadata)


def tensors_of(request: LogprobsOptions, scores: list[Scores]) -> Tensors:
    tensors: Tensors = {"lengths": np.array([len(score.logprobs) for score in scores], dtype=np.int32)}
    if request.reduce == "sum":
        tensors["sums"] = flat([sum_of(score) for score in scores])
    else:
        tensors["logprobs"] = flat([score.logprobs for score in scores])
    if request.entropy:
        tensors["entropy"] = flat([score.entropy for score in scores if score.entropy is not None])
    if k := request.top_logprobs:
        ids = [score.top_ids for score in scores if score.top_ids is not None]
        logprobs = [score.top_logprobs for score in scores if score.top_logprobs is not None]
        tensors["top_ids"] = np.concatenate([np.zeros((0, k), dtype=np.int32), *ids])
        tensors["top_logprobs"] = np.concatenate([np.zeros((0, k), dtype=np.float32), *logprobs])
    candidates = [score.candidate_logprobs for score in scores if score.candidate_logprobs is not None]
    if candidates:
        tensors["candidate_logprobs"] = flat(candidates)
    return tensors


def flat(arrays: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, dtype=np.float32), *arrays])
