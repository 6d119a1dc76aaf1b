"""Attention over a prefix tree: both kernels against a dense float64 mask, and what is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from logprobd.engine import flex
from logprobd.engine.attention import TreeAttention, TreeKernel, UnsupportedAttentionError
from logprobd.engine.blocks import KEY_BLOCK
from logprobd.engine.cache import PathCache
from logprobd.engine.flex import BLOCK, FlexTreeKernel, SeenRows, ordered_blocks, visible_blocks
from logprobd.engine.nodes import QUERY_ROWS, NodeKernel
from logprobd.engine.packing import PrefixTree, Window, cut, pack
from oracle import CPU, dense_tree_attention, dense_tree_mask, ids_of

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}

GQA = (4, 2, 16, 16)  # heads, key heads, key size, value size
MHA = (4, 4, 16, 16)
ONE_KEY_HEAD_NARROW_VALUES = (3, 1, 24, 16)
WIDE_VALUES = (4, 2, 16, 24)

small_trees = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=7).map(
    lambda lists: pack([ids_of(ids) for ids in lists])
)


def branching_tree(longest: int, seed: int = 0) -> PrefixTree:
    """A tree with one path of `longest` tokens, and others that leave it at random depths."""
    random = np.random.default_rng(seed)
    trunk = random.integers(0, 50, longest)
    tails = [random.integers(0, 50, int(random.integers(1, 40))) for _ in range(6)]
    branches = [np.concatenate([trunk, tail])[-longest:] for tail in tails[:1]]
    branches += [np.concatenate([trunk[: random.integers(1, longest)], tail])[:longest] for tail in tails]
    return pack([ids_of(branch.tolist()) for branch in [trunk, *branches, trunk[: longest // 2]]])


def whole(tree: PrefixTree) -> Window:
    """A tree as a single window."""
    (window,) = cut(tree, tree.num_tokens)
    return window


def attend_both_ways(
    kernel: TreeKernel,
    tree: PrefixTree,
    sizes: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel and what the oracle say on the same random inputs."""
    heads, kv_heads, dim, value_dim = sizes
    random = torch.Generator().manual_seed(0)
    query = torch.randn(heads, tree.num_tokens, dim, generator=random).to(dtype)
    key = torch.randn(kv_heads, tree.num_tokens, dim, generator=random).to(dtype)
    value = torch.randn(kv_heads, tree.num_tokens, value_dim, generator=random).to(dtype)
    sinks = torch.randn(heads, generator=random).to(dtype) + 1 if with_sinks else None
    with torch.inference_mode():
        got = kernel.attend(query, key, value, scaling=0.4, window=window, softcap=softcap, sinks=sinks)
    assert got.dtype == dtype
    return got, dense_tree_attention(query, key, value, tree, 0.4, window, softcap, sinks)


def attend_in_windows(
    make: Callable[[Window, torch.device], TreeKernel],
    tree: PrefixTree,
    max_tokens: int,
    reach: int | None,
    filling: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel says window by window, with the keys that a cache keeps, and what the oracle says at once."""
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(heads, tree.num_tokens, 16, generator=random) for heads in (4, 2, 2))
    windows = cut(tree, max_tokens)
    cache = PathCache(windows)
    parts = []
    for window in cache:
        own = slice(window.first, window.first + window.num_tokens)
        rows = [torch.nn.functional.pad(tensor[:, own], (0, 0, 0, filling)) for tensor in (query, key, value)]
        keys, values = cache.extend(7, rows[1], rows[2], reach)
        kernel = make(window, CPU)
        with torch.inference_mode():
            got = kernel.attend(rows[0], keys, values, scaling=0.4, window=reach, softcap=None, sinks=None)
        parts.append(got[: window.num_tokens])
    return torch.cat(parts), dense_tree_attention(query, key, value, tree, 0.4, reach, None, None)


@given(small_trees, st.integers(1, 9), st.sampled_from([None, 1, 2, 3, 50]), st.sampled_from([0, 3]))
@settings(max_examples=150, deadline=None)
def test_nodes_in_windows_equal_a_dense_mask_on_any_tree(
    tree: PrefixTree, max_tokens: int, reach: int | None, filling: int
) -> None:
    got, expected = attend_in_windows(NodeKernel, tree, max_tokens, reach, filling)

    assert largest_error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("reach", [None, 5, KEY_BLOCK, KEY_BLOCK + 1, 700])
@pytest.mark.parametrize("max_tokens", [100, 257, KEY_BLOCK])
def test_nodes_in_windows_equal_a_dense_mask_on_a_long_tree(reach: int | None, max_tokens: int) -> None:
    tree = branching_tree(longest=3 * KEY_BLOCK + 90)
    got, expected = attend_in_windows(NodeKernel, tree, max_tokens, reach, 16)

    assert largest_error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("reach", [None, 200])
def test_flex_in_windows_equals_a_dense_mask(reach: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not compiled: with the sizes of two kinds of rows torch 2.13 writes wrong C++ for a CPU (see below).
    monkeypatch.setattr(flex, "compiled_flex_attention", lambda: flex_attention)
    for longest, max_tokens in ((1400, 300), (900, 500)):
        tree = branching_tree(longest, seed=longest)
        got, expected = attend_in_windows(FlexTreeKernel, tree, max_tokens, reach, 5)

        assert largest_error(got, expected) < TOLERANCE[torch.float32]


def test_a_cache_holds_no_more_of_a_layer_than_its_window_reaches() -> None:
    windows = cut(pack([ids_of([1] * 8000)]), 500)
    cache = PathCache(windows)
    held: dict[int | None, int] = {}
    for window in cache:
        for layer, reach in enumerate((None, 100)):
            key = torch.zeros(1, window.num_tokens, 2)
            keys, _ = cache.extend(layer, key, key, reach)
            held[reach] = max(held.get(reach, 0), keys.shape[1])

    assert held[None] == 8000
    assert 500 + 100 <= held[100] + 1 <= 500 + 100 + KEY_BLOCK


def largest_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.double() - expected).abs().max())


@given(small_trees, st.sampled_from([None, 1, 2, 3, 7, 50]), st.sampled_from([None, 1.5]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_nodes_equal_a_dense_mask_on_any_tree(
    tree: PrefixTree, window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    kernel = NodeKernel(whole(tree), CPU)
    got, expected = attend_both_ways(kernel, tree, GQA, window, softcap, with_sinks, torch.float32)

    assert largest_error(got, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 5, QUERY_ROWS, QUERY_ROWS + 1, 299, 300, 301])
@pytest.mark.parametrize("sizes", [GQA, MHA, ONE_KEY_HEAD_NARROW_VALUES])
def test_nodes_equal_a_dense_mask_on_a_long_tree(
    sizes: tuple[int, int, int, int], window: int | None, softcap: float | None, with_sinks: bool, dtype: torch.dtype
) -> None:
    tree = branching_tree(longest=300)
    got, expected = attend_both_ways(NodeKernel(whole(tree), CPU), tree, sizes, window, softcap, with_sinks, dtype)

    assert tree.positions.max() + 1 == 300
    assert largest_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 30, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1, 700])
def test_nodes_equal_a_dense_mask_over_several_blocks_of_keys(window: int | None, softcap: float | None) -> None:
    tree = branching_tree(longest=2 * KEY_BLOCK + 90)
    got, expected = attend_both_ways(NodeKernel(whole(tree), CPU), tree, GQA, window, softcap, True, torch.float32)

    assert largest_error(got, expected) < TOLERANCE[torch.float32]


def test_rows_after_the_last_token_stay_finite_and_unseen() -> None:
    tree = branching_tree(longest=60)
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, tree.num_tokens + 5, 16, generator=random)
    kernel = NodeKernel(whole(tree), CPU)
    got = kernel.attend(query, key, value, scaling=0.4, window=None, softcap=None, sinks=None)
    query, key, value = (tensor[:, : tree.num_tokens] for tensor in (query, key, value))
    expected = dense_tree_attention(query, key, value, tree, 0.4, None, None, None)

    assert got.shape == (tree.num_tokens + 5, 2, 16)
    assert got.isfinite().all()
    assert largest_error(got[: tree.num_tokens], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("sizes", "window", "softcap", "dtype", "lengths"),
    [
        (GQA, None, None, torch.float32, (300, 500)),
        (MHA, 40, None, torch.bfloat16, (300, 500)),
        (ONE_KEY_HEAD_NARROW_VALUES, None, 2.0, torch.float32, (300, 500)),
        (WIDE_VALUES, 299, 2.0, torch.float32, (300, 500)),
        (GQA, 40, 2.0, torch.float32, (60, 41)),  # one block
    ],
)
def test_flex_equals_a_dense_mask(
    sizes: tuple[int, int, int, int],
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    lengths: tuple[int, int],
) -> None:
    # Compiled for a CPU, a second variant in one process can fail to build: in its C++, torch 2.13 renames
    # the size "ks18" along with "ks1". CUDA kernels are not made that way.
    torch._dynamo.reset()
    for longest in lengths:
        tree = branching_tree(longest, seed=longest)
        got, expected = attend_both_ways(FlexTreeKernel(whole(tree), CPU), tree, sizes, window, softcap, False, dtype)

        assert largest_error(got, expected) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_flex_knows_sinks(window: int | None, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    tree = branching_tree(longest=300)
    got, expected = attend_both_ways(FlexTreeKernel(whole(tree), CPU), tree, GQA, window, 2.0, True, dtype)

    assert largest_error(got, expected) < TOLERANCE[dtype]


def block_truth(seen: SeenRows, window: int | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Of the dense mask over whole blocks: which block pairs have a visible entry, and which have only such."""
    dense = dense_tree_mask(seen.positions, seen.subtree_end, window)
    blocks = len(dense) // BLOCK
    pairs = dense.reshape(blocks, BLOCK, blocks, BLOCK)
    return np.asarray(pairs.any(axis=(1, 3))), np.asarray(pairs.all(axis=(1, 3)))


def trees_of_blocks() -> list[PrefixTree]:
    """Trees of up to nine blocks: deep, bushy, many small ones, and ends at and beside those of blocks."""
    random = np.random.default_rng(0)
    unrelated = pack([ids_of([root, *random.integers(0, 9, 60).tolist()]) for root in range(15)])
    aligned = pack([ids_of([root] * BLOCK) for root in range(4)])
    shared = pack([ids_of([1] * (2 * BLOCK) + [root] * BLOCK) for root in range(2, 6)])
    just_over, just_under = (pack([ids_of([1] * n), ids_of([2] * 200)]) for n in (BLOCK + 1, 2 * BLOCK - 1))
    branching = [branching_tree(700, 1), branching_tree(1000, 2), branching_tree(40, 3)]
    return [*branching, unrelated, aligned, shared, just_over, just_under]


@pytest.mark.parametrize("tree", trees_of_blocks())
def test_visible_blocks_are_exact_without_a_window(tree: PrefixTree) -> None:
    seen = SeenRows.of(whole(tree), 0)
    any_visible, all_visible = visible_blocks(seen, None)
    any_expected, all_expected = block_truth(seen, None)

    assert any_visible.tolist() == any_expected.tolist()
    assert all_visible.tolist() == all_expected.tolist()


@pytest.mark.parametrize("window", [1, 2, 60, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 500, 5000])
@pytest.mark.parametrize("tree", trees_of_blocks())
def test_visible_blocks_with_a_window_miss_nothing_and_promise_nothing_wrong(tree: PrefixTree, window: int) -> None:
    seen = SeenRows.of(whole(tree), 0)
    any_visible, all_visible = visible_blocks(seen, window)
    any_expected, all_expected = block_truth(seen, window)

    assert not (any_expected & ~any_visible).any()
    assert not (all_visible & ~all_expected).any()
    assert not (all_visible & ~any_visible).any()


def test_a_window_leaves_out_blocks_that_it_cannot_reach() -> None:
    seen = SeenRows.of(whole(pack([ids_of([1] * (8 * BLOCK))])), 0)
    any_visible, all_visible = visible_blocks(seen, 2 * BLOCK)

    assert any_visible.sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3, 3, 3]
    assert all_visible.sum(axis=1).tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


def test_ordered_blocks_come_first_and_are_counted() -> None:
    chosen = np.array([[True, False, False], [False, False, True], [True, False, True]])
    counts, indices = ordered_blocks(chosen, CPU)
    chosen_indices = [row[:count].tolist() for count, row in zip(counts[0, 0], indices[0, 0], strict=True)]

    assert chosen_indices == [[0], [2], [0, 2]]


def call(attention: TreeAttention, num_rows: int = 3, **arguments: Any) -> torch.Tensor:
    query = torch.ones(1, 2, num_rows, 8)
    attended, weights = attention(torch.nn.Identity(), query, query, query, **{"attention_mask": None, **arguments})
    assert weights is None
    return attended


@pytest.mark.parametrize(
    "arguments",
    [
        {"attention_mask": torch.zeros(1, 1, 3, 3)},
        {"is_causal": False},
        {"position_bias": torch.zeros(1, 2, 3, 3)},
        {"sinks": torch.zeros(2)},
        {"an_argument_of_tomorrow": torch.zeros(3)},
    ],
)
def test_what_a_tree_cannot_honour_is_refused(arguments: dict[str, Any]) -> None:
    attention = TreeAttention("nodes")

    with attention.over(whole(pack([ids_of([1, 2, 3])])), CPU), pytest.raises(UnsupportedAttentionError):
        call(attention, **arguments)


def test_a_batch_of_several_rows_is_refused() -> None:
    attention = TreeAttention("nodes")
    query = torch.ones(2, 2, 3, 8)

    with (
        attention.over(whole(pack([ids_of([1, 2, 3])])), CPU),
        pytest.raises(UnsupportedAttentionError, match="one packed"),
    ):
        attention(torch.nn.Identity(), query, query, query, None)


def test_queries_without_their_keys_are_refused() -> None:
    attention = TreeAttention("nodes")
    query, key = torch.ones(1, 2, 1, 8), torch.ones(1, 2, 3, 8)

    with attention.over(whole(pack([ids_of([1, 2, 3])])), CPU), pytest.raises(UnsupportedAttentionError):
        attention(torch.nn.Identity(), query, key, key, None)


def test_a_forward_pass_without_a_tree_is_a_bug() -> None:
    attention = TreeAttention("nodes")

    with pytest.raises(AssertionError, match=r"outside TreeAttention\.over"):
        call(attention)


def test_a_tree_is_forgotten_when_its_block_ends() -> None:
    attention = TreeAttention("nodes")
    with attention.over(whole(pack([ids_of([1, 2, 3])])), CPU):
        attended = call(attention, is_causal=True, position_bias=None)

    assert attended.shape == (1, 3, 2, 8)
    with pytest.raises(AssertionError):
        call(attention)


def test_the_scaling_of_a_layer_without_one_is_that_of_its_head_size() -> None:
    attention = TreeAttention("nodes")
    tree = pack([ids_of([1, 2, 3, 4])])
    query, key, value = torch.randn(3, 1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    with attention.over(whole(tree), CPU):
        attended = attention(torch.nn.Identity(), query, key, value, None)[0]
    expected = dense_tree_attention(query[0], key[0], value[0], tree, 0.25, None, None, None)

    assert largest_error(attended[0], expected) < TOLERANCE[torch.float32]


def test_every_layer_brings_its_own_window() -> None:
    attention = TreeAttention("nodes")
    modules = [torch.nn.Identity(), torch.nn.Identity()]
    query = torch.ones(1, 2, 3, 8)
    with attention.over(whole(pack([ids_of([1, 2, 3])])), CPU):
        attention(modules[0], query, query, query, None)
        attention(modules[1], query, query, query, None, sliding_window=2)

    assert attention.windows == {id(modules[0]): None, id(modules[1]): 2}
