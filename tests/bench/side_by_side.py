"""A stock backbone over many causal rows at once, side by side in one, where a row may go on from others.

Matrix products get all tokens together, which is as fast as they can be; attention goes row by row through
transformers' own SDPA function, over the row's own keys and those that it goes on from. Nothing of ours computes
here, and nothing is spent on bits that do not depend on company.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from logprobd.sequences import IntArray

NAME = "bench_side_by_side"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    side_by_side: list["Row"],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    attended = []
    for row, q in zip(side_by_side, query.split([row.num_own for row in side_by_side], dim=2), strict=True):
        k, v = (tensor[:, :, row.path] for tensor in (key, value))
        options |= {"attention_mask": row.mask, "is_causal": row.mask is None}
        attended.append(sdpa_attention_forward(module, q, k, v, **options)[0])
    return torch.cat(attended, dim=1), None


def no_mask(*_arguments: Any, **_options: Any) -> None:
    """Each row is causal by itself."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)


@contextmanager
def attending_side_by_side(model: PreTrainedModel) -> Iterator[None]:
    current = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(current)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row of `num_own` tokens at the end of `path`: the places of all that it sees, a slice where it is alone."""

    num_own: int
    depth: int
    path: torch.Tensor | slice
    mask: torch.Tensor | None

    @classmethod
    def along(cls, path: IntArray, num_own: int, device: torch.device) -> Self:
        """Alone it is plainly causal, and needs no mask."""
        depth = len(path) - num_own
        if not depth:
            return cls(num_own, depth, slice(int(path[0]), int(path[0]) + num_own), None)
        mask = torch.full((num_own, len(path)), -torch.inf, device=device).triu(depth + 1)
        return cls(num_own, depth, torch.from_numpy(path).to(device).long(), mask[None, None])


def hidden_states(model: PreTrainedModel, ids: torch.Tensor, rows: list[Row]) -> list[torch.Tensor]:
    """The last hidden states (tokens, hidden size) of each row, all computed in one forward pass over `ids`."""
    positions = torch.cat([torch.arange(row.depth, row.depth + row.num_own, device=model.device) for row in rows])
    decoder: torch.nn.Module = model.get_decoder()
    with attending_side_by_side(model):
        states = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False, side_by_side=rows)[0][0]
    return list(states.split([row.num_own for row in rows]))
