"""A stock backbone over many causal rows at once, side by side in one: no padding, no mask, no row sees another.

Matrix products get all tokens together, which is as fast as they can be; attention goes row by row through
transformers' own SDPA function. Nothing of ours computes here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "bench_side_by_side"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    row_lengths: list[int],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    rows = zip(*(tensor.split(row_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    options |= {"attention_mask": None, "is_causal": True}
    attended = [sdpa_attention_forward(module, q, k, v, **options)[0] for q, k, v in rows]
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


def hidden_states(model: PreTrainedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The last hidden states (tokens, hidden size) of each row of ids, all computed in one forward pass."""
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    decoder: torch.nn.Module = model.get_decoder()
    with attending_side_by_side(model):
        states = decoder(
            input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False, row_lengths=lengths
        )[0][0]
    return list(states.split(lengths))
