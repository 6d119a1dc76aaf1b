"""Lays sequences out as a prefix tree, so that what they share is computed once. Numpy only.

Sorted, each sequence contributes only the tokens beyond its longest common prefix with the one before
it. The result is a prefix tree in depth-first order. Token q may attend to token k exactly when
`k <= q and q < subtree_end[k]`: the tokens below k stand together, right after it.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from logprobd.sequences import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A stretch of the tree without a branch, as indices into the packed row.

    The node's own tokens are `start:end`, everything below it is `end:subtree_end`, and the tokens
    above it, from the root down, are `ancestors` (their number is the node's depth).
    """

    start: int
    end: int
    subtree_end: int
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


def find_nodes(tree: PrefixTree) -> list[Node]:
    """The tree's nodes in packed order, each with the indices of its ancestors."""
    if not tree.num_tokens:
        return []
    same_end = tree.subtree_end[1:] == tree.subtree_end[:-1]
    goes_on = tree.positions[1:] == tree.positions[:-1] + 1
    starts = np.concatenate([[0], np.flatnonzero(~(same_end & goes_on)) + 1])
    ends = np.append(starts[1:], tree.num_tokens)
    path = np.zeros(int(tree.positions.max()) + 1, dtype=np.int32)
    nodes = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        depth = int(tree.positions[start])
        path[depth : depth + end - start] = np.arange(start, end)
        nodes.append(Node(start, end, int(tree.subtree_end[start]), path[:depth].copy()))
    return nodes
