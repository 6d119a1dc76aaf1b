"""Attention over a prefix tree with FlexAttention: the way on CUDA, and testable on a CPU.

The block mask comes from the tree itself, block by block, without ever building the (rows, rows) mask.
The kernel is compiled once for dynamic sizes; rows are padded to whole blocks.
"""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from logprobd.engine.packing import PrefixTree
from logprobd.sequences import IntArray

BLOCK = 128

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """FlexAttention compiled for dynamic sizes: new lengths need no new compilation."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


class FlexTreeKernel:
    """Attention over the rows of one tree; block masks are made once for each window in use."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self.num_rows = tree.num_tokens + -tree.num_tokens % BLOCK
        self.positions = np.pad(tree.positions, (0, self.num_rows - tree.num_tokens))
        # A padding row sees only itself, so that its softmax stays finite.
        padding_rows = np.arange(tree.num_tokens, self.num_rows)
        self.subtree_end = np.concatenate([tree.subtree_end, padding_rows + 1]).astype(np.int32)
        self.longest = int(tree.positions.max()) + 1
        self.device = device
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
        query, key, value = (self._pad(tensor) for tensor in (query, key, value))
        reaching = window if window is not None and window < self.longest else None
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
            block_mask=self._mask(reaching),
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

    def _pad(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, 0, 0, self.num_rows - tensor.shape[1]))[None].contiguous()

    def _mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> BlockMask:
        any_visible, all_visible = visible_blocks(self.positions, self.subtree_end, window)
        partial = ordered_blocks(any_visible & ~all_visible, self.device)
        full = ordered_blocks(all_visible, self.device)
        return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=self._mask_mod(window))

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.positions).to(self.device), torch.from_numpy(self.subtree_end).to(self.device)

    def _mask_mod(self, window: int | None) -> MaskMod:
        positions, subtree_end = self._on_device

        def in_tree(_b: torch.Tensor, _h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & (q < subtree_end[k])

        if window is None:
            return in_tree
        reach = torch.tensor(window, device=self.device)  # a tensor, so that no window is compiled in

        def in_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return in_tree(b, h, q, k) & (positions[q] - positions[k] < reach)

        return in_window


def softcap_mod(softcap: float, device: torch.device) -> Callable[..., torch.Tensor]:
    """Gemma's `cap * tanh(score / cap)` as FlexAttention's score function."""

    cap = torch.tensor(softcap, device=device)  # a tensor, like the window

    def apply(score: torch.Tensor, *_indices: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return apply


def visible_blocks(
    positions: IntArray, subtree_end: IntArray, window: int | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Which (query block, key block) pairs have any visible entry, and which have nothing but visible ones.

    "Any" may be generous for windows (the mask function has the last word); "all" is never.
    """
    num_blocks = len(positions) // BLOCK
    first_row = np.arange(num_blocks) * BLOCK
    ends = subtree_end.reshape(num_blocks, BLOCK)
    earlier = first_row[:, None] > first_row[None, :]
    any_visible = earlier & (ends.max(axis=1)[None, :] > first_row[:, None])
    any_visible |= np.eye(num_blocks, dtype=bool)
    all_visible = earlier & (ends.min(axis=1)[None, :] >= first_row[:, None] + BLOCK)
    if window is not None:
        depth = positions.reshape(num_blocks, BLOCK)
        any_visible &= depth.min(axis=1)[:, None] - depth.max(axis=1)[None, :] < window
        all_visible &= depth.max(axis=1)[:, None] - depth.min(axis=1)[None, :] < window
    return any_visible, all_visible


def ordered_blocks(chosen: np.ndarray[Any, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """FlexAttention's form of a block matrix: how many key blocks a query block has, and which come first."""
    counts = chosen.sum(axis=1, dtype=np.int32)
    indices = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None].to(device), torch.from_numpy(indices)[None, None].to(device)
