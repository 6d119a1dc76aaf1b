"""Attention over a prefix tree with FlexAttention: the way on CUDA, and testable on a CPU.

The block mask comes from the tree itself, block by block, without ever building the (rows, rows) mask.
The kernel is compiled once for dynamic sizes; rows are padded to whole blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from logprobd.engine.blocks import first_key, round_up
from logprobd.engine.packing import Window
from logprobd.sequences import IntArray

BLOCK = 128

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention compiled for dynamic sizes: new lengths need no new compilation."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


class FlexTreeKernel:
    """Attention over the rows of one window; block masks are made once for each reach in use."""

    def __init__(self, window: Window, device: torch.device) -> None:
        self.window, self.device = window, device
        self.longest = int(window.positions.max()) + 1
        self._masks: dict[int | None, BlockMask] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """See attention.TreeKernel."""
        num_rows = query.shape[1]
        mask = self._mask(window if window is not None and window < self.longest else None)
        num_queries, num_keys = mask.seq_lengths
        query, key, value = fill_up(query, num_queries), fill_up(key, num_keys), fill_up(value, num_keys)
        asked = {} if sinks is None else {"return_aux": AuxRequest(lse=True)}
        # On a CPU no logsumexp comes out of the compiled kernel yet; the eager one is slow, and the same.
        eager = sinks is not None and self.device.type == "cpu"
        plain: Any = flex_attention
        kernel = plain if eager else compiled_flex_attention()
        result = kernel(
            query,
            key,
            value,
            score_mod=None if softcap is None else softcap_mod(softcap, self.device),
            block_mask=mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
            **asked,
        )
        out = result
        if sinks is not None:
            out, aux = result
            out = out * torch.sigmoid(aux.lse - sinks.float()[None, :, None])[..., None].to(out.dtype)
        attended: torch.Tensor = out[0, :, :num_rows].transpose(0, 1)
        return attended

    def _mask(self, reach: int | None) -> BlockMask:
        if reach not in self._masks:
            self._masks[reach] = self._build_mask(
                SeenRows.of(self.window, first_key(self.window.shallowest, reach)), reach
            )
        return self._masks[reach]

    def _build_mask(self, seen: "SeenRows", reach: int | None) -> BlockMask:
        any_visible, all_visible = visible_blocks(seen, reach)
        partial = ordered_blocks(any_visible & ~all_visible, self.device)
        full = ordered_blocks(all_visible, self.device)
        lengths = (seen.num_queries, len(seen.positions))
        return BlockMask.from_kv_blocks(
            *partial, *full, BLOCK_SIZE=BLOCK, mask_mod=self._mask_mod(seen, reach), seq_lengths=lengths
        )

    def _mask_mod(self, seen: "SeenRows", window: int | None) -> MaskMod:
        # Nothing but rows of numbers, so that no number is compiled in.
        positions, subtree_end, own_row = (
            torch.from_numpy(values).to(self.device)
            for values in (seen.positions, seen.subtree_end, np.arange(seen.num_queries) + seen.num_cached)
        )

        def in_tree(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= own_row[q]) & (own_row[q] < subtree_end[k])

        if window is None:
            return in_tree
        out_of_reach = torch.from_numpy(seen.depths - window).to(self.device)

        def in_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return in_tree(b, h, q, k) & (positions[k] > out_of_reach[q])

        return in_window


def fill_up(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A batch of one with that many rows, the last of them zeros."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, num_rows - tensor.shape[1]))[None].contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class SeenRows:
    """What a window sees from some key on, in whole blocks: keys (positions, subtree_end), queries (depths).

    Query q stands at row q + `num_cached` of the keys.
    """

    positions: IntArray
    subtree_end: IntArray
    depths: IntArray
    num_cached: int

    @property
    def num_queries(self) -> int:
        return len(self.depths)

    @classmethod
    def of(cls, window: Window, first: int) -> "SeenRows":
        num_cached = window.num_cached - first
        num_keys = len(window.positions) - first
        num_queries = round_up(window.num_tokens, BLOCK)
        # A padding row sees only itself, so that its softmax stays finite.
        num_rows = round_up(num_cached + num_queries, BLOCK)
        padding = np.arange(num_keys, num_rows, dtype=np.int32)
        return cls(
            positions=np.concatenate([window.positions[first:], 0 * padding]),
            subtree_end=np.concatenate([window.subtree_end[first:] - np.int32(first), padding + 1]),
            depths=np.pad(window.positions[window.num_cached :], (0, num_queries - window.num_tokens)),
            num_cached=num_cached,
        )


def softcap_mod(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """Gemma's `cap * tanh(score / cap)` as FlexAttention's score function."""

    cap = torch.tensor(softcap, device=device)  # a tensor, like the window

    def apply(score: torch.Tensor, *_indices: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return apply


def visible_blocks(seen: SeenRows, window: int | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Which (query block, key block) pairs have any visible entry, and which have nothing but visible ones.

    "Any" may be generous for windows (the mask function has the last word); "all" is never.
    """
    ends = seen.subtree_end.reshape(-1, BLOCK)
    query = (np.arange(seen.num_queries // BLOCK) * BLOCK + seen.num_cached)[:, None]
    key = (np.arange(len(ends)) * BLOCK)[None, :]
    last_query, last_key = query + BLOCK - 1, key + BLOCK - 1
    any_visible = (key <= last_query) & (ends.max(axis=1)[None, :] > query)
    all_visible = (last_key <= query) & (ends.min(axis=1)[None, :] > last_query)
    if window is not None:
        depth, position = seen.depths.reshape(-1, BLOCK), seen.positions.reshape(-1, BLOCK)
        any_visible &= depth.min(axis=1)[:, None] - position.max(axis=1)[None, :] < window
        all_visible &= depth.max(axis=1)[:, None] - position.min(axis=1)[None, :] < window
    return any_visible, all_visible


def ordered_blocks(chosen: np.ndarray[Any, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of a block matrix: how many key blocks a query block has, and which come first."""
    counts = chosen.sum(axis=1, dtype=np.int32)
    indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)
