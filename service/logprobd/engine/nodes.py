"""Attention over a prefix tree, node by node, with torch's fused CPU attention.

A node's tokens are the queries; their keys are the node's path, from the root down, gathered into one
stretch. So a token meets its keys in the order, and in the blocks, in which it would meet them alone:
its bits do not depend on what else is in the batch, and they are those of the model's own SDPA. (Two
calls without a copy, over the shared part and the own part, met by their logsumexp, take 0.8 to 0.95 of
the time and give up both.)
"""

import math

import torch

from logprobd.engine.blocks import KEY_BLOCK, ROWS, first_key, fused_attention, invariant_keys, round_up
from logprobd.engine.packing import Node, Window, find_nodes

QUERY_ROWS = 256  # rows of a node at a time: less work above the diagonal, and bounded masks


class NodeKernel:
    """Attention over the nodes of one window."""

    def __init__(self, window: Window, device: torch.device) -> None:
        self.nodes = [_PlacedNode(node, window.num_cached, device) for node in find_nodes(window)]
        self.shallowest = window.shallowest
        self.longest = int(window.positions.max()) + 1
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
        query = self._pad_queries(query)
        band = self._band(window if window is not None and window < self.longest else None, query.dtype)
        first = first_key(self.shallowest, window)
        layer = _Layer(query, key, value, first, band, scaling, softcap, keeps_lse=sinks is not None)
        for node in self.nodes:
            layer.attend(node)
        if sinks is not None:
            layer.add_sinks(sinks)
        return layer.out.reshape(-1, heads, dim)[:num_rows, :, :value_dim]

    def _pad_queries(self, query: torch.Tensor) -> torch.Tensor:
        """As many rows as the padding of the last node's queries reaches."""
        last = self.nodes[-1].rows
        lacking = last.start + round_up(last.stop - last.start, ROWS) - query.shape[1]
        return torch.nn.functional.pad(query, (0, 0, 0, lacking)) if lacking > 0 else query

    def _band(self, window: int | None, dtype: torch.dtype) -> "_Band":
        """The mask of a layer's window, made once a batch and shared by its layers."""
        if (window, dtype) not in self._bands:
            self._bands[window, dtype] = _Band(self.longest, window, dtype)
        return self._bands[window, dtype]


class _PlacedNode:
    """A node: its query rows, and by depth the rows of its path, filled up (with one of its own) to a whole block."""

    def __init__(self, node: Node, num_cached: int, device: torch.device) -> None:
        self.rows = slice(node.start - num_cached, node.end - num_cached)
        self.depth = len(node.ancestors)
        own = torch.arange(node.start, node.end)
        filling = torch.full((-(self.depth + len(own)) % KEY_BLOCK,), node.start)
        self.path = torch.cat([torch.from_numpy(node.ancestors).long(), own, filling]).to(device)


class _Band:
    """Masks (0 where a key is seen, -inf where not) for any rows, as slices of one band matrix.

    Row r of the band sees columns up to `middle + r`, and with a window no more than `window` of them.
    """

    def __init__(self, longest: int, window: int | None, dtype: torch.dtype) -> None:
        self.window = window
        self.middle = longest + ROWS
        ahead = torch.arange(2 * self.middle + QUERY_ROWS + KEY_BLOCK)[None, :] - self.middle
        ahead = ahead - torch.arange(QUERY_ROWS)[:, None]
        hidden = ahead > 0 if window is None else (ahead > 0) | (ahead <= -window)
        self._band = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)

    def mask(self, depth: int, num_rows: int, first_key: int, end_key: int) -> torch.Tensor:
        """For rows from `depth` on and the keys first_key:end_key of their path: (rows, keys)."""
        shift = self.middle - depth
        return self._band[:num_rows, shift + first_key : shift + end_key]


class _Layer:
    """One layer's attention under way.

    Query heads that share a key head are folded: query (kv_heads, per_kv, rows, dim), key and value
    (kv_heads, rows, dim) from key `first` of the window on, out (rows, kv_heads, per_kv, dim), lse
    (rows, kv_heads, per_kv) where sinks need it.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: int,
        band: _Band,
        scaling: float,
        softcap: float | None,
        *,
        keeps_lse: bool,
    ) -> None:
        heads, num_rows, dim = query.shape
        kv_heads = key.shape[0]
        self.key, self.value, self.first = key, value, first
        self.per_kv = heads // kv_heads
        self.query = query.reshape(kv_heads, self.per_kv, num_rows, dim)
        self.band, self.scaling, self.softcap = band, scaling, softcap
        # Zeros: rows that belong to no node (padding) must stay finite.
        self.out = query.new_zeros((num_rows, kv_heads, self.per_kv, dim))
        self.lse = self.out.new_zeros(self.out.shape[:-1], dtype=torch.float32) if keeps_lse else None

    def attend(self, node: _PlacedNode) -> None:
        """Attention of a node's tokens to their path."""
        length = self._num_keys(node.depth + node.rows.stop - node.rows.start)
        path = node.path[self.first : length] - self.first
        key, value = self.key.index_select(1, path), self.value.index_select(1, path)
        for start in range(node.rows.start, node.rows.stop, QUERY_ROWS):
            rows = slice(start, min(start + QUERY_ROWS, node.rows.stop))
            num_rows = rows.stop - start
            depth = node.depth + start - node.rows.start
            begin, end = first_key(depth, self.band.window), min(length, self._num_keys(depth + num_rows))
            mask = self.band.mask(depth, round_up(num_rows, ROWS), begin, end)
            keys = slice(begin - self.first, end - self.first)
            self._attend_rows(rows, key[:, None, keys], value[:, None, keys], mask)

    def _num_keys(self, needed: int) -> int:
        """With the filling that makes them invariant. Without a fused kernel only whole blocks are."""
        if self.softcap is not None:
            return round_up(needed, KEY_BLOCK)
        return invariant_keys(needed, self.key.shape[-1], self.key.dtype)

    def _attend_rows(self, rows: slice, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> None:
        """Attention of some rows to gathered keys and values (kv_heads, 1, keys, dim)."""
        query = self.query[:, :, rows.start : rows.start + len(mask)]
        if self.softcap is None:
            key, value = (tensor.expand(-1, self.per_kv, -1, -1) for tensor in (key, value))
            mask = mask.expand(*query.shape[:2], -1, -1)
            out, lse = fused_attention(query, key, value, 0.0, False, attn_mask=mask, scale=self.scaling)
        else:
            out, lse = attend_with_softcap(query, key, value, mask, self.scaling, self.softcap)
        num_rows = rows.stop - rows.start
        self.out[rows] = out[:, :, :num_rows].permute(2, 0, 1, 3)
        if self.lse is not None:
            self.lse[rows] = lse[:, :, :num_rows].permute(2, 0, 1)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """A sink is one more key of a head with this score and a value of zero (gpt-oss)."""
        assert self.lse is not None, "sinks for a layer that kept no logsumexp. This is a bug."
        by_head = sinks.float().reshape(self.lse.shape[1:])
        self.out.mul_(torch.sigmoid(self.lse - by_head)[..., None].to(self.out.dtype))


def attend_with_softcap(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with Gemma 2's `cap * tanh(score / cap)`, for which there is no fused kernel.

    It goes over whole blocks of keys like the fused one (FlashAttention, arXiv:2205.14135, algorithm 1).
    """
    query = query.float() * scaling
    most = query.new_full(query.shape[:-1], -math.inf)
    total = query.new_zeros(query.shape[:-1])
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]))
    for start in range(0, key.shape[-2], KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        scores = query @ key[..., block, :].float().transpose(-1, -2)
        scores = scores.div_(softcap).tanh_().mul_(softcap).add_(mask[..., block])
        # A row that sees nothing of the first blocks (a window) has no largest score yet.
        largest = torch.maximum(most, scores.amax(dim=-1)).clamp_min(torch.finfo(scores.dtype).min)
        scores = scores.sub_(largest[..., None]).exp_()
        shrink = torch.exp(most - largest)
        total = total * shrink + scores.sum(dim=-1)
        out = out * shrink[..., None] + scores @ value[..., block, :].float()
        most = largest
    return out / total[..., None], most + total.log()
