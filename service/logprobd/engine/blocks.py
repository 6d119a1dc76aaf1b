"""Shapes for which a CPU's kernels give a row the same bits whatever else is computed with it.

A matrix product adds up in blocks, and where libraries cut them depends on the number of rows (only for few of
them) and on the length of the sum. So rows come in multiples, and attention sums over lengths that are cut
like a whole block of keys; which those are is found by trying.
"""

from functools import cache

import torch

KEY_BLOCK = 512  # keys that torch's fused attention takes at a time: where keys are cut off it must be at whole blocks
ROWS = 16  # products of fewer rows take other kernels; elementwise ones round the last numbers of a stretch otherwise


def round_up(number: int, multiple: int) -> int:
    return number + -number % multiple


def first_key(depth: int, reach: int | None) -> int:
    """The first key that tokens from `depth` on can see, rounded down to a whole block; `reach` is a window's."""
    return 0 if reach is None else max(0, depth - reach + 1) // KEY_BLOCK * KEY_BLOCK


def invariant_keys(num_keys: int, dim: int, dtype: torch.dtype) -> int:
    """The least number of keys, no less than `num_keys`, whose last block is summed up like a whole one."""
    whole = num_keys // KEY_BLOCK * KEY_BLOCK
    return whole + next(length for length in last_blocks(dim, dtype) if length >= num_keys - whole)


@cache
@torch.inference_mode()
def last_blocks(dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The numbers of keys for which fused attention has the bits of a whole block, filled up with masked keys."""
    random = torch.Generator().manual_seed(0)
    heads = 4 if dtype == torch.float32 else 48
    query, key, value = (
        torch.randn((1, heads, rows, dim), generator=random).to(dtype) for rows in (ROWS, KEY_BLOCK, KEY_BLOCK)
    )

    def attend(num_keys: int, num_seen: int) -> torch.Tensor:
        mask = torch.zeros((1, heads, ROWS, num_keys), dtype=dtype)
        mask[..., num_seen:] = -torch.inf
        keys, values = key[:, :, :num_keys], value[:, :, :num_keys]
        out: torch.Tensor = fused_attention(query, keys, values, 0.0, False, attn_mask=mask)[0]
        return out

    lengths = range(ROWS, KEY_BLOCK, ROWS)
    same = [length for length in lengths if torch.equal(attend(length, length), attend(KEY_BLOCK, length))]
    if dtype != torch.float32:  # rounded to fewer bits, sums in another order may look the same
        same = [length for length in same if length in last_blocks(dim, torch.float32)]
    return (0, *same, KEY_BLOCK)


fused_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
