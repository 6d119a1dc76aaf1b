"""Attention over a prefix tree, registered with transformers as one more attention implementation.

A layer hands over its own scaling, window, softcap and sinks, so one object serves every layer of a
model. On a CPU the work goes node by node through the fused kernel; on CUDA, or where asked, through
FlexAttention (see flex.py). Which tokens stand in the row is all that is known about the batch. A row too
long for one pass comes in windows, whose layers find the keys of the path so far in a PathCache.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from logprobd.engine.cache import PathCache
from logprobd.engine.flex import FlexTreeKernel
from logprobd.engine.nodes import NodeKernel
from logprobd.engine.packing import Window

Backend = Literal["nodes", "flex"]

Windows = dict[int, int | None]
"""By the id of a module that attended, its window (None: it sees everything before it)."""

# Tensors that layers hand to attention functions without a meaning for them. Any other tensor (a bias, a
# choice of keys, a mask of a new kind) would change the result, and a tree cannot honour it.
HARMLESS_TENSORS = frozenset({"position_ids", "cache_position"})

_names = itertools.count()


class UnsupportedAttentionError(Exception):
    """A layer asks for something that attention over a tree would silently leave out."""


class TreeKernel(Protocol):
    """What computes attention over the rows of one window of a tree."""

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
        """Shapes: query (heads, rows, dim), key (kv_heads, keys, dim), value (kv_heads, keys, value_dim);
        the result is (rows, heads, value_dim) in the query's dtype.

        The rows are the window's own; the keys are all that it sees, from `blocks.first_key` on.
        """


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """The mask function beside this attention: the tree is the mask."""


class TreeAttention:
    """An attention implementation of transformers whose mask is the prefix tree of the current batch."""

    def __init__(self, backend: Backend) -> None:
        self.name = f"logprobd_tree_{next(_names)}"
        self.backend = backend
        self.held: dict[int, tuple[int, int | None]] = {}  # by module, bytes of a token's key and value, and the window
        self._kernel: TreeKernel | None = None
        self._cache: PathCache | None = None
        AttentionInterface.register(self.name, self)
        AttentionMaskInterface.register(self.name, no_mask)

    @property
    def windows(self) -> Windows:
        """The sliding window of each module that has attended so far."""
        return {module: window for module, (_, window) in self.held.items()}

    @contextmanager
    def over(self, window: Window, device: torch.device, cache: PathCache | None = None) -> Iterator[None]:
        """Attend over a window in the forward pass made inside this block; `cache` goes with its tree's windows."""
        self._kernel = NodeKernel(window, device) if self.backend == "nodes" else FlexTreeKernel(window, device)
        self._cache = cache
        try:
            yield
        finally:
            self._kernel = self._cache = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Shapes: query (1, heads, rows, dim), key and value (1, kv_heads, rows, dim) -> (1, rows, heads, dim)."""
        assert self._kernel is not None, "a forward pass outside TreeAttention.over. This is a bug."
        refuse_unsupported(attention_mask, is_causal, kwargs)
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise UnsupportedAttentionError(f"queries of shape {tuple(query.shape)} are not one packed row")
        query, key, value = (as_autocast(tensor) for tensor in (query, key, value))
        self.held[id(module)] = (key[0, :, 0].nbytes + value[0, :, 0].nbytes, sliding_window)
        keys, values = key[0], value[0]
        if self._cache is not None:
            keys, values = self._cache.extend(id(module), keys, values, sliding_window)
        attended = self._kernel.attend(
            query[0],
            keys,
            values,
            scaling=1 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux,
        )
        return attended[None], None


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Under autocast, what its list of operations would do to attention's inputs; else the tensor itself."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def refuse_unsupported(mask: torch.Tensor | None, is_causal: bool | None, kwargs: dict[str, Any]) -> None:
    """Raise on whatever a layer asks for that attention over a tree would silently leave out."""
    if mask is not None:
        raise UnsupportedAttentionError("a layer brings a mask of its own")
    if is_causal is False:
        raise UnsupportedAttentionError("a layer attends to later tokens")
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in HARMLESS_TENSORS:
            raise UnsupportedAttentionError(f"a layer asks for {name}")
