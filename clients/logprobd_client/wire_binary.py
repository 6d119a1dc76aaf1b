"""The binary form: flat tensors one after the other in a safetensors file, and the rest as JSON in its metadata."""

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load

from logprobd_client.requests import IntArray, Options, Part, options_on_wire, pieces
from logprobd_client.results import Result, candidate_scores

HEADER_SIZE_BYTES = 8  # a file begins with the length of its JSON header
ITEM_BYTES = 4


def encode(part: Part, options: Options) -> bytes:
    prompts, completions = [group.prompt for group in part.groups], part.completions
    tensors: dict[str, list[Any]] = {
        "prompt_ids": prompts,
        "prompt_lengths": [lengths_of(prompts)],
        "completion_ids": completions,
        "completion_lengths": [lengths_of(completions)],
        "completions_per_prompt": [lengths_of(group.completions for group in part.groups)],
    }
    if (asked := part.candidates) is not None:
        tensors["candidate_ids"] = [candidates.ids for candidates in asked]
        tensors["candidate_lengths"] = [candidates.lengths for candidates in asked]
    return save(tensors, {"options": json.dumps(options_on_wire(options), allow_nan=False)})


def lengths_of(lists: Iterable[Any]) -> IntArray:
    return np.array([len(item) for item in lists], dtype=np.int32)


def save(tensors: dict[str, list[IntArray]], metadata: dict[str, str]) -> bytes:
    """A safetensors file of flat int32 tensors, each given as the arrays that follow each other in it.

    Joined by the library, they are copied three times, which takes twenty times as long.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, arrays in tensors.items():
        start, end = end, end + sum(array.nbytes for array in arrays)
        header[name] = {"dtype": "I32", "shape": [(end - start) // ITEM_BYTES], "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % HEADER_SIZE_BYTES)  # the format pads so that what follows is aligned
    size = len(encoded).to_bytes(HEADER_SIZE_BYTES, "little")
    return b"".join([size, encoded, *(array.data for array in chain.from_iterable(tensors.values()))])


def decode(content: bytes, part: Part, options: Options) -> Result:
    tensors, reply = load(content), json.loads(metadata_of(content)["reply"])

    def column(name: str, lengths: Iterable[int]) -> list[NDArray[Any]]:
        """One array a completion; writable, as torch wants it."""
        return pieces(np.require(tensors[name], requirements="W"), lengths)

    def column_if_given(name: str) -> list[NDArray[Any]] | None:
        return column(name, tensors["lengths"].tolist()) if name in tensors else None

    candidates = None
    if (asked := part.candidates) is not None:
        totals = [len(one.ids) for one in asked]
        candidates = candidate_scores(column("candidate_logprobs", totals), asked)
    summed = options.reduce == "sum"
    return Result(
        logprobs=tensors["sums"].tolist() if summed else column("logprobs", tensors["lengths"].tolist()),
        entropy=column_if_given("entropy"),
        top_ids=column_if_given("top_ids"),
        top_logprobs=column_if_given("top_logprobs"),
        candidate_logprobs=candidates,
        token_ids=None,
        temperature=reply["temperature"],
        model=reply["model"],
        usage=reply["usage"],
    )


def metadata_of(content: bytes) -> dict[str, str]:
    """The strings beside the tensors, which safetensors' own reader of bytes leaves out."""
    end = HEADER_SIZE_BYTES + int.from_bytes(content[:HEADER_SIZE_BYTES], "little")
    metadata: dict[str, str] = json.loads(content[HEADER_SIZE_BYTES:end])["__metadata__"]
    return metadata
