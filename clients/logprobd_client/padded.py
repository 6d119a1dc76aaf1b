"""Padded rows, as trainers hold them: to a call's prompts and completions, and back to arrays of their shape."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logprobd_client.arguments import join_equal_prompts, read_ids
from logprobd_client.requests import Call, Group, IntArray, Options
from logprobd_client.results import FloatArray, PaddedResult, Result


@dataclass(frozen=True, slots=True, eq=False)
class PaddedRows:
    """Rows to score: `mask` (rows, longest) says where scores are wanted.

    Each completion ends with the last token that is wanted; what the mask leaves out before that is context. A row
    that wants nothing is not sent.
    """

    mask: NDArray[np.bool_]
    prompts: list[IntArray]
    completions: list[IntArray]

    def call(self, options: Options) -> Call:
        """The rows as a call of a list of completions a row, which is empty where nothing is wanted."""
        rows = zip(self.prompts, self.completions, strict=True)
        groups = [Group(prompt, [completion]) for prompt, completion in rows if len(completion)]
        sizes = [min(1, len(completion)) for completion in self.completions]
        return Call(join_equal_prompts(groups), sizes, options, has_text=False)

    def fill(self, result: Result) -> PaddedResult:
        """The scores where they belong, 0.0 elsewhere."""
        entropy = None if result.entropy is None else self._padded(result.entropy)
        return PaddedResult(self._padded(result.logprobs), entropy, result.temperature, result.model, result.usage)

    def _padded(self, items: list[list[FloatArray]]) -> FloatArray:
        padded = np.zeros(self.mask.shape, dtype=np.float32)
        for row, scored in enumerate(items):
            for scores in scored:  # one, or none
                padded[row, : len(scores)] = scores
        padded[~self.mask] = 0.0
        return padded


def read_rows(
    prompt_ids: Iterable[Any], completion_ids: Iterable[Any], completion_mask: Any, prompt_mask: Any
) -> PaddedRows:
    """Padded or ragged ids with their masks; raises ValueError, naming the argument, where they do not fit together."""
    prompts = [read_ids(ids, "prompt_ids", row) for row, ids in enumerate(prompt_ids)]
    completions = [read_ids(ids, "completion_ids", row) for row, ids in enumerate(completion_ids)]
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} rows of prompt_ids and {len(completions)} of completion_ids")
    if prompt_mask is not None:
        kept = read_mask(prompt_mask, prompts, "prompt_mask")
        prompts = [ids[mask[: len(ids)]] for ids, mask in zip(prompts, kept, strict=True)]
    wanted = (
        mask_of(completions) if completion_mask is None else read_mask(completion_mask, completions, "completion_mask")
    )
    ends = [int(np.flatnonzero(row)[-1]) + 1 if row.any() else 0 for row in wanted]
    return PaddedRows(wanted, prompts, [ids[:end] for ids, end in zip(completions, ends, strict=True)])


def mask_of(lists: list[IntArray]) -> NDArray[np.bool_]:
    """Where ragged rows have tokens, (rows, longest)."""
    lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
    mask: NDArray[np.bool_] = np.arange(lengths.max(initial=0)) < lengths[:, None]
    return mask


def read_mask(mask: Any, lists: list[IntArray], name: str) -> NDArray[np.bool_]:
    """A mask (rows, longest) of 0 and 1, whatever its type, which has no 1 beyond the ids of its row."""
    read = np.asarray(mask)
    if read.ndim != 2 or len(read) != len(lists):
        raise ValueError(f"{name}: expected shape ({len(lists)}, longest), got {read.shape}")
    chosen: NDArray[np.bool_] = read.astype(bool)
    lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
    beyond = chosen & (np.arange(read.shape[1]) >= lengths[:, None])
    if beyond.any():
        row = int(beyond.any(axis=1).argmax())
        raise ValueError(f"{name}[{row}] has a 1 beyond its {lengths[row]} ids")
    return chosen
