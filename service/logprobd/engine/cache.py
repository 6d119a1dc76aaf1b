"""Keys and values of the path that leads to a window, kept from one window to the next, layer by layer.

It sits in the attention function, below whatever a model calls its cache: keys arrive there rotated and
normalized, as the model's own attention would read them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from logprobd.engine.blocks import ROWS, first_key
from logprobd.engine.packing import Window


@dataclass(slots=True)
class _Held:
    """One layer's keys (kv_heads, capacity, dim) and values; they begin at key `first` of what a window sees."""

    keys: torch.Tensor
    values: torch.Tensor
    first: int


class PathCache:
    """The keys and values of the windows of one tree, in their order.

    Each layer holds one buffer for what its current window sees: with a sliding window no more than that
    reaches back.
    """

    def __init__(self, windows: Seq[Window]) -> None:
        self._windows = windows
        self._number = 0
        self._layers: dict[int, _Held] = {}

    def __iter__(self) -> Iterator[Window]:
        """The windows; each step makes the next one current."""
        for number, window in enumerate(self._windows):
            self._number = number
            yield window

    def extend(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, reach: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a layer's own rows behind the path's: (kv_heads, seen rows from the first in reach on, dim)."""
        if len(self._windows) == 1:
            return key, value
        window = self._windows[self._number]
        held = self._layers.get(layer) or self._allocate(layer, key, value, reach)
        if self._number:
            self._keep_path(held, self._windows[self._number - 1], first_key(window.shallowest, reach))
        start = window.num_cached - held.first
        end = start + key.shape[1]
        held.keys[:, start:end] = key
        held.values[:, start:end] = value
        return held.keys[:, :end], held.values[:, :end]

    def _allocate(self, layer: int, key: torch.Tensor, value: torch.Tensor, reach: int | None) -> _Held:
        # A window's rows may be followed by filling.
        longest = max(w.num_cached - first_key(w.shallowest, reach) + w.num_tokens for w in self._windows)
        held = _Held(
            key.new_empty((key.shape[0], longest + ROWS, key.shape[2])),
            value.new_empty((value.shape[0], longest + ROWS, value.shape[2])),
            0,
        )
        self._layers[layer] = held
        return held

    def _keep_path(self, held: _Held, before: Window, first: int) -> None:
        """Move the path to the current window to the front of the buffer."""
        kept = torch.from_numpy(before.next_path[first:] - held.first).to(held.keys.device)
        held.keys[:, : len(kept)] = held.keys.index_select(1, kept)
        held.values[:, : len(kept)] = held.values.index_select(1, kept)
        held.first = first
