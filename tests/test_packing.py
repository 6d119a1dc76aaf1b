"""The prefix tree: what is in it, who sees whom, and how it falls into nodes."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from logprobd.engine.packing import Node, PrefixTree, common_prefix_length, cut, find_nodes, pack
from logprobd.sequences import IntArray
from oracle import dense_tree_mask, ids_of

Prefix = tuple[int, ...]

# Three ids, so that beginnings are shared all the time.
id_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=9)


def pack_lists(lists: list[list[int]]) -> PrefixTree:
    return pack([ids_of(ids) for ids in lists])


def nodes_of(tree: PrefixTree) -> list[Node]:
    """The nodes of a tree that is one window."""
    return [node for window in cut(tree, max(1, tree.num_tokens)) for node in find_nodes(window)]


def prefixes_of(lists: list[list[int]]) -> set[Prefix]:
    return {tuple(ids[: end + 1]) for ids in lists for end in range(len(ids))}


def prefix_of_each_token(tree: PrefixTree) -> list[Prefix]:
    """What each packed token stands for: the ids from the root down to it, read off the paths."""
    prefixes: list[Prefix] = [()] * tree.num_tokens
    for path in tree.paths:
        ids = tree.ids[path].tolist()
        for depth, token in enumerate(path.tolist()):
            prefixes[token] = tuple(ids[: depth + 1])
    return prefixes


@given(id_lists)
@example([])
@example([[1]])
@example([[1, 2, 1]])
@example([[1, 2], [1, 2]])
@example([[1, 2, 0], [1, 2], [1]])
@example([[0], [1], [2]])
def test_every_sequence_can_be_read_back(lists: list[list[int]]) -> None:
    tree = pack_lists(lists)

    assert [tree.ids[path].tolist() for path in tree.paths] == lists
    assert [tree.positions[path].tolist() for path in tree.paths] == [list(range(len(ids))) for ids in lists]
    assert {array.dtype for array in (tree.ids, tree.positions, tree.subtree_end, *tree.paths)} == {np.dtype(np.int32)}


@given(id_lists)
@example([])
def test_there_is_one_token_for_each_distinct_prefix(lists: list[list[int]]) -> None:
    tree = pack_lists(lists)

    assert sorted(prefix_of_each_token(tree)) == sorted(prefixes_of(lists))
    assert tree.contributed.sum() == tree.num_tokens
    assert len(tree.contributed) == len(lists)


@given(id_lists)
def test_no_sequence_contributes_more_than_its_own_tokens(lists: list[list[int]]) -> None:
    tree = pack_lists(lists)

    assert (tree.contributed >= 0).all()
    assert all(added <= len(ids) for added, ids in zip(tree.contributed.tolist(), lists, strict=True))


@given(id_lists)
def test_a_token_sees_itself_and_its_ancestors_and_nothing_else(lists: list[list[int]]) -> None:
    tree = pack_lists(lists)
    prefixes = prefix_of_each_token(tree)
    ancestors = [[q[: len(k)] == k for k in prefixes] for q in prefixes]

    assert dense_tree_mask(tree.positions, tree.subtree_end, None).tolist() == ancestors


@given(id_lists)
@example([[0, 1], [1, 1]])
@example([[0, 0, 1], [0, 0], [0, 1]])
def test_nodes_partition_the_row_and_know_their_ancestors(lists: list[list[int]]) -> None:
    tree = pack_lists(lists)
    seen = dense_tree_mask(tree.positions, tree.subtree_end, None)
    nodes = nodes_of(tree)

    assert [token for node in nodes for token in range(node.start, node.end)] == list(range(tree.num_tokens))
    for node in nodes:
        assert node.start < node.end
        assert node.ancestors.tolist() == np.flatnonzero(seen[node.start, : node.start]).tolist()
        for token in range(node.start, node.end):
            path = [*node.ancestors.tolist(), *range(node.start, token + 1)]
            assert np.flatnonzero(seen[token]).tolist() == path


@given(id_lists.filter(bool), st.integers(1, 12))
@example([[0, 0, 1, 2], [0, 0, 1, 1], [0, 1], [1]], 2)
def test_a_window_sees_of_earlier_tokens_the_path_to_it_and_of_its_own_what_the_tree_says(
    lists: list[list[int]], max_tokens: int
) -> None:
    tree = pack_lists(lists)
    whole = dense_tree_mask(tree.positions, tree.subtree_end, None)
    windows = cut(tree, max_tokens)
    path: list[int] = []

    assert [token for w in windows for token in range(w.first, w.first + w.num_tokens)] == list(range(tree.num_tokens))
    for window in windows:
        own = list(range(window.first, window.first + window.num_tokens))
        packed = np.array([*path, *own])
        seen = dense_tree_mask(window.positions, window.subtree_end, None)
        assert window.num_tokens <= max_tokens
        assert window.num_cached == len(path)
        assert window.ids.tolist() == tree.ids[own].tolist()
        assert window.positions.tolist() == tree.positions[packed].tolist()
        assert window.shallowest == tree.positions[window.first :].min()
        assert seen[len(path) :].tolist() == whole[own][:, packed].tolist()
        # Nothing else that the tree lets them see is missing.
        assert whole[own].sum() == seen[len(path) :].sum()
        path = packed[window.next_path].tolist()
    assert path == []


@given(id_lists.filter(bool), st.integers(1, 12))
def test_the_nodes_of_a_window_know_their_ancestors_behind_the_path(lists: list[list[int]], max_tokens: int) -> None:
    for window in cut(pack_lists(lists), max_tokens):
        seen = dense_tree_mask(window.positions, window.subtree_end, None)
        nodes = find_nodes(window)
        own = range(window.num_cached, window.num_cached + window.num_tokens)

        assert [token for node in nodes for token in range(node.start, node.end)] == list(own)
        for node in nodes:
            for token in range(node.start, node.end):
                assert np.flatnonzero(seen[token]).tolist() == [*node.ancestors.tolist(), *range(node.start, token + 1)]


def test_a_stretch_without_a_branch_is_one_node() -> None:
    tree = pack_lists([[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4, 5]])

    assert [(node.start, node.end) for node in nodes_of(tree)] == [(0, 5)]


def test_a_branch_makes_three_nodes() -> None:
    tree = pack_lists([[1, 2, 3, 4], [1, 2, 5]])
    nodes = [(node.start, node.end, node.ancestors.tolist()) for node in nodes_of(tree)]

    assert nodes == [(0, 2, []), (2, 4, [0, 1]), (4, 5, [0, 1])]


def test_an_empty_list_is_an_empty_tree() -> None:
    tree = pack([])

    assert (tree.num_tokens, tree.paths, nodes_of(tree)) == (0, (), [])
    assert [array.shape for array in (tree.ids, tree.positions, tree.subtree_end, tree.contributed)] == [(0,)] * 4


def test_one_sequence_is_laid_out_as_it_is() -> None:
    tree = pack_lists([[7, 7, 8]])

    assert tree.ids.tolist() == [7, 7, 8]
    assert tree.positions.tolist() == [0, 1, 2]
    assert tree.subtree_end.tolist() == [3, 3, 3]
    assert tree.contributed.tolist() == [3]


def test_identical_sequences_cost_one() -> None:
    tree = pack_lists([[5, 6, 7]] * 4)

    assert tree.num_tokens == 3
    assert sorted(tree.contributed.tolist()) == [0, 0, 0, 3]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2]] * 4


def test_a_prefix_of_another_sequence_costs_nothing() -> None:
    tree = pack_lists([[5, 6, 7, 8], [5, 6]])

    assert tree.num_tokens == 4
    assert tree.paths[1].tolist() == tree.paths[0][:2].tolist()


def test_ids_of_all_byte_lengths_are_sorted_as_numbers() -> None:
    lists = [[first, second] for first in (0, 1, 255, 256, 65_536, 2**31 - 1) for second in (1, 256)]
    tree = pack_lists(lists[::-1])

    assert tree.ids[tree.positions == 0].tolist() == [0, 1, 255, 256, 65_536, 2**31 - 1]
    assert tree.num_tokens == 6 * 3


def test_paths_are_not_shared_between_sequences() -> None:
    tree = pack_lists([[1, 2], [1, 2], [1, 3]])
    tree.paths[0][:] = 9

    assert [path.tolist() for path in tree.paths[1:]] == [[0, 1], [0, 2]]


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [2], 0),
        ([1], [1], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], [1, 9, 3], 1),
    ],
)
def test_common_prefix_length(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix_length(ids_of(a), ids_of(b)) == common_prefix_length(ids_of(b), ids_of(a)) == length


@given(id_lists.flatmap(lambda lists: st.tuples(st.just(lists), st.permutations(range(len(lists))))))
@settings(max_examples=50)
def test_the_order_of_the_sequences_does_not_change_the_tree(case: tuple[list[list[int]], list[int]]) -> None:
    lists, order = case
    tree = pack_lists(lists)
    shuffled = pack_lists([lists[index] for index in order])

    assert shuffled.ids.tolist() == tree.ids.tolist()
    assert shuffled.subtree_end.tolist() == tree.subtree_end.tolist()
    assert [path.tolist() for path in shuffled.paths] == [tree.paths[index].tolist() for index in order]


def groups_of(num_groups: int, completions: int, prompt: int, length: int) -> list[IntArray]:
    """Random sequences of one length; those of a group share exactly their first `prompt` tokens."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 50_000, (num_groups, completions, length)).astype(np.int32)
    ids[:, :, :prompt] = ids[:, :1, :prompt]
    ids[:, :, prompt] = np.arange(completions)
    ids[:, :, 0] = np.arange(num_groups)[:, None]
    return list(ids.reshape(-1, length))


def test_half_a_million_tokens_in_groups_are_packed_right() -> None:
    sequences = groups_of(num_groups=64, completions=8, prompt=512, length=1024)
    random = np.random.default_rng(1)
    random.shuffle(sequences)
    tree = pack(sequences)
    nodes = nodes_of(tree)

    assert tree.num_tokens == tree.contributed.sum() == 64 * 512 + 512 * 512
    assert len(nodes) == 64 + 512
    assert all((tree.ids[path] == ids).all() for path, ids in zip(tree.paths, sequences, strict=True))
    assert all((tree.positions[path] == np.arange(1024)).all() for path in tree.paths)
    assert all((tree.subtree_end[path] > path[-1]).all() for path in tree.paths)
    assert {(node.end - node.start, len(node.ancestors)) for node in nodes} == {(512, 0), (512, 512)}


def test_half_a_million_unrelated_tokens_are_packed_right() -> None:
    random = np.random.default_rng(2)
    sequences = list(random.integers(0, 50_000, (512, 1024)).astype(np.int32))
    tree = pack(sequences)
    distinct = [len(np.unique(np.stack(sequences)[:, :length], axis=0)) for length in range(1, 6)]

    assert distinct[-1] == 512
    assert tree.num_tokens == sum(distinct) + 512 * (1024 - 5)
    assert all((tree.ids[path] == ids).all() for path, ids in zip(tree.paths, sequences, strict=True))
    assert (tree.subtree_end > np.arange(tree.num_tokens)).all()
