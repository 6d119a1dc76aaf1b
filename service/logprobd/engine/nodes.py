"""Attention over a prefix tree, node by node, with torch's fused CPU attention.

A node's tokens are the queries; their keys are the node's path, from the root down, gathered into one
stretch. So a token meets its keys in the order, and in the blocks, in which it would meet them alone:
its bits do not depend on what else is in the batch, and they are those of the model's own SDPA. (Two
calls without a copy, over the shared part and the own part, met by their logsumexp, take 0.8 to 0.95 of
the time and give up both.)
"""

import math

import torch

from logprobd.engine.packing import Node, PrefixTree, find_nodes

QUERY_ROWS = 256  # rows of a node at a time: less work above the diagonal, and bounded masks
KEY_MULTIPLE = 16  # keys are padded to whole vectors, since the kernel's last few take another exponential
KEY_BLOCK = 512  # the kernel's own: where a window starts it must cut keys at the same places

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class NodeKernel:
    """Attention over the nodes of one tree."""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self.nodes = [_PlacedNode(node, device) for node in find_nodes(tree)]
        self.longest = int(tree.positions.max()) + 1
        self._bands: dict[tuple[int | None, torch.dtype], _Band] = {}

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
        heads, num_rows, dim = query.shape
        value_dim = value.shape[-1]
        # The fused kernel has one head size; DeepSeek's values are narrower than its keys.
        value = torch.nn.functional.pad(value, (0, dim - value_dim)) if value_dim < dim else value
        band = self._band(window if window is not None and window < self.longest else None, query.dtype)
        layer = _Layer(query, key, value, band, scaling, softcap, keeps_lse=sinks is not None)
        for node in self.nodes:
            layer.attend(node)
        if sinks is not None:
            layer.add_sinks(sinks)
        return layer.out.reshape(num_rows, heads, dim)[..., :value_dim]

    def _band(self, window: int | None, dtype: torch.dtype) -> "_Band":
        """The mask of a layer's window, made once a batch and shared by its layers."""
        if (window, dtype) not in self._bands:
            self._bands[window, dtype] = _Band(self.longest, window, dtype)
        return self._bands[window, dtype]


class _PlacedNode:
    """A node with the packed indices of its path, padded (with a token of its own) to whole vectors."""

    def __init__(self, node: Node, device: torch.device) -> None:
        self.start, self.end = node.start, node.end
        self.depth = len(node.ancestors)
        own = torch.arange(node.start, node.end)
        length = self.depth + len(own)
        padding = torch.full((-length % KEY_MULTIPLE,), node.start)
        self.path = torch.cat([torch.from_numpy(node.ancestors).long(), own, padding]).to(device)


class _Band:
    """Masks (0 where a key is seen, -inf where not) for any rows, as slices of one band matrix.

    Row r of the band sees columns up to `middle + r`, and with a window no more than `window` of them.
    """

    def __init__(self, longest: int, window: int | None, dtype: torch.dtype) -> None:
        self.window = window
        self.middle = longest
        ahead = torch.arange(2 * longest + QUERY_ROWS + KEY_MULTIPLE)[None, :] - longest
        ahead = ahead - torch.arange(QUERY_ROWS)[:, None]
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        self._band = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)

    def first_key(self, depth: int) -> int:
        """The first key that a row at this depth, or a later one, can see; cut at a whole block."""
        return 0 if self.window is None else max(0, depth - self.window + 1) // KEY_BLOCK * KEY_BLOCK

    def mask(self, depth: int, num_rows: int, first_key: int, end_key: int) -> torch.Tensor:
        """For rows from `depth` on and the keys first_key:end_key of their path: (rows, keys)."""
        shift = self.middle - depth
        return self._band[:num_rows, shift + first_key : shift + end_key]


class _Layer:
    """One layer's attention under way.

    Query heads that share a key head are folded: query (kv_heads, per_kv, rows, dim), key and value
    (kv_heads, rows, dim), out (rows, kv_heads, per_kv, dim), lse (rows, kv_heads, per_kv) where sinks need it.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        band: _Band,
        scaling: float,
        softcap: float | None,
        *,
        keeps_lse: bool,
    ) -> None:
        heads, num_rows, dim = query.shape
        kv_heads = key.shape[0]
        self.key, self.value = key, value
        self.per_kv = heads // kv_heads
        self.query = query.reshape(kv_heads, self.per_kv, num_rows, dim)
        self.band, self.scaling, self.softcap = band, scaling, softcap
        # Zeros: rows that belong to no node (padding) must stay finite.
        self.out = query.new_zeros((num_rows, kv_heads, self.per_kv, dim))
        self.lse = self.out.new_zeros(self.out.shape[:-1], dtype=torch.float32) if keeps_lse else None

    def attend(self, node: _PlacedNode) -> None:
        """Attention of a node's tokens to their path."""
        key, value = self.key.index_select(1, node.path), self.value.index_select(1, node.path)
        for start in range(node.start, node.end, QUERY_ROWS):
            end = min(start + QUERY_ROWS, node.end)
            depth = node.depth + start - node.start
            first_key = self.band.first_key(depth)
            end_key = depth + end - start
            end_key += -end_key % KEY_MULTIPLE
            mask = self.band.mask(depth, end - start, first_key, end_key)
            keys = slice(first_key, end_key)
            self._attend_rows(slice(start, end), key[:, None, keys], value[:, None, keys], mask)

    def _attend_rows(self, rows: slice, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> None:
        """Attention of some rows to gathered keys and values (kv_heads, 1, keys, dim)."""
        query = self.query[:, :, rows]
        if self.softcap is None:
            key, value = (tensor.expand(-1, self.per_kv, -1, -1) for tensor in (key, value))
            mask = mask.expand(*query.shape[:2], -1, -1)
            out, lse = _fused(query, key, value, 0.0, False, attn_mask=mask, scale=self.scaling)
        else:
            out, lse = attend_with_softcap(query, key, value, mask, self.scaling, self.softcap)
        self.out[rows] = out.permute(2, 0, 1, 3)
        if self.lse is not None:
            self.lse[rows] = lse.permute(2, 0, 1)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """A sink is one more key of a head with this score and a value of zero (gpt-oss)."""
        assert self.lse is not None, "sinks for a layer that kept no logsumexp. This is a bug."
        by_head = sinks.float().reshape(self.lse.shape[1:])
        self.out.mul_(torch.sigmoid(self.lse - by_head)[..., None].to(self.out.dtype))


def attend_with_softcap(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with Gemma 2's `cap * tanh(score / cap)`, for which there is no fused kernel."""
    scores = (query.float() * scaling) @ key.float().transpose(-1, -2)
    scores = scores.div_(softcap).tanh_().mul_(softcap).add_(mask)
    lse = torch.logsumexp(scores, dim=-1)
    return scores.sub_(lse[..., None]).exp_() @ value.float(), lse
