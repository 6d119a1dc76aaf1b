"""Lays sequences out as a prefix tree, so that what they share is computed once. Numpy only.

Sorted, each sequence contributes only the tokens beyond its longest common prefix with the one before
it. The result is a prefix tree in depth-first order. Token q may attend to token k exactly when
`k <= q and q < subtree_end[k]`: the tokens below k stand together, right after it.

A row too long for one forward pass is cut into windows. Depth-first order makes that cheap: of all that was
computed before a window its tokens see only the path that leads to its first one.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from logprobd.sequences import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A stretch of a window without a branch, as indices into what the window sees.

    The node's own tokens are `start:end`, and the tokens above it, from the root down, are `ancestors`
    (their number is the node's depth).
    """

    start: int
    end: int
    ancestors: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Sequences packed into one row of `num_tokens` distinct tokens.

    `ids`, `positions` (a token's depth) and `subtree_end` have shape (num_tokens,). `paths[i]` holds the
    packed indices of sequence i's tokens; `contributed[i]` says how many of them it brought itself.
    """

    ids: IntArray
    positions: IntArray
    subtree_end: IntArray
    paths: tuple[IntArray, ...]
    contributed: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A stretch of packed tokens for one forward pass, behind the path that leads to it.

    What the window sees is itself a tree in depth-first order: the path's `num_cached` tokens, computed
    before, and then the window's own; `positions` and `subtree_end` describe both. `ids` and `first` (an index
    into the packed row) are those of its own tokens. `shallowest` is the least depth of any token from here on,
    and `next_path` holds the indices, into what this window sees, of the path to the next one.
    """

    first: int
    ids: IntArray
    positions: IntArray
    subtree_end: IntArray
    num_cached: int
    shallowest: int
    next_path: IntArray

    @property
    def num_tokens(self) -> int:
        """Its own tokens."""
        return len(self.ids)


def pack(sequences: Seq[IntArray]) -> PrefixTree:
    """Pack token id sequences, each of at least one token, into a prefix tree."""
    # Big-endian bytes compare like the ids do, and memcmp is far faster than comparing arrays.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">i4").tobytes())
    total = sum(len(ids) for ids in sequences)
    subtree_end = np.zeros(total, dtype=np.int32)
    path = np.zeros(max(map(len, sequences), default=0), dtype=np.int32)
    paths: list[IntArray] = [path] * len(sequences)
    contributed = np.zeros(len(sequences), dtype=np.int32)
    segments: list[IntArray] = []
    depths: list[IntArray] = []
    size, previous = 0, np.zeros(0, dtype=np.int32)
    for index in order:
        ids = sequences[index]
        shared = common_prefix_length(previous, ids)
        subtree_end[path[shared : len(previous)]] = size
        added = len(ids) - shared
        path[shared : len(ids)] = np.arange(size, size + added)
        segments.append(ids[shared:])
        depths.append(np.arange(shared, len(ids), dtype=np.int32))
        paths[index] = path[: len(ids)].copy()
        contributed[index] = added
        size, previous = size + added, ids
    subtree_end[path[: len(previous)]] = size
    empty = [np.zeros(0, dtype=np.int32)]
    return PrefixTree(
        ids=np.concatenate(segments or empty),
        positions=np.concatenate(depths or empty),
        subtree_end=subtree_end[:size].copy(),
        paths=tuple(paths),
        contributed=contributed,
    )


def common_prefix_length(a: IntArray, b: IntArray) -> int:
    """The number of leading ids that two sequences share."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def cut(tree: PrefixTree, max_tokens: int) -> list[Window]:
    """Cut the packed row into windows of at most `max_tokens` tokens."""
    shallowest = np.minimum.accumulate(tree.positions[::-1])[::-1]
    windows: list[Window] = []
    path = np.zeros(0, dtype=np.int32)  # packed indices of the path to the window's first token
    for first in range(0, tree.num_tokens, max_tokens):
        end = min(first + max_tokens, tree.num_tokens)
        seen = np.concatenate([path, np.arange(first, end, dtype=np.int32)])
        kept = seen[tree.subtree_end[seen] > end] if end < tree.num_tokens else seen[:0]
        windows.append(
            Window(
                first=first,
                ids=tree.ids[first:end],
                positions=tree.positions[seen],
                subtree_end=np.minimum(tree.subtree_end[seen], end) - np.int32(first - len(path)),
                num_cached=len(path),
                shallowest=int(shallowest[first]),
                next_path=np.searchsorted(seen, kept).astype(np.int32),
            )
        )
        path = kept
    return windows


def find_nodes(window: Window) -> list[Node]:
    """The nodes among a window's own tokens, in packed order, each with the indices of its ancestors."""
    positions, subtree_end, cached = window.positions, window.subtree_end, window.num_cached
    same_end = subtree_end[cached + 1 :] == subtree_end[cached:-1]
    goes_on = positions[cached + 1 :] == positions[cached:-1] + 1
    starts = np.concatenate([[0], np.flatnonzero(~(same_end & goes_on)) + 1]) + cached
    ends = np.append(starts[1:], len(positions))
    path = np.zeros(int(positions.max()) + 1, dtype=np.int32)
    path[:cached] = np.arange(cached)
    nodes = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        depth = int(positions[start])
        path[depth : depth + end - start] = np.arange(start, end)
        nodes.append(Node(start, end, path[:depth].copy()))
    return nodes
