"""How the sequences of a batch go through a model: as a prefix tree, or as right-padded rows.

A layout turns sequences into forward passes of bounded size. Nothing runs until a pass is asked for, so the
hidden states of only one pass exist at a time.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from logprobd.engine.attention import Backend, TreeAttention, Windows
from logprobd.engine.blocks import KEY_BLOCK, ROWS
from logprobd.engine.budget import PassBudget
from logprobd.engine.cache import PathCache
from logprobd.engine.model import LoadedModel
from logprobd.engine.packing import Window, cut, pack
from logprobd.engine.rope import LengthClasses
from logprobd.engine.selective import Pass
from logprobd.sequences import IntArray, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A batch ready for the model: its forward passes, made one by one as they are asked for.

    `rows[i]` are the rows, counted through all passes, that predict sequence i's completion tokens;
    `computed[i]` is the number of tokens that go through the model on its account.
    """

    passes: Iterator[Pass]
    rows: tuple[IntArray, ...]
    computed: IntArray


class SharedLayout:
    """All sequences in one row, a prefix tree, cut into windows where it is longer than a pass may be."""

    in_windows = True

    def __init__(
        self, loaded: LoadedModel, backbone: torch.nn.Module, classes: LengthClasses, backend: Backend | None
    ) -> None:
        self.device, self.backbone, self.classes = loaded.device, backbone, classes
        self.attention = TreeAttention(backend or ("flex" if loaded.device.type == "cuda" else "nodes"))
        loaded.model.set_attn_implementation(self.attention.name)

    @property
    def windows(self) -> Windows:
        """The sliding window of each module that has attended over a tree so far."""
        return self.attention.windows

    def parts(self, lengths: dict[int, int], _max_tokens: int) -> list[list[int]]:
        """Which sequences (of these lengths) are laid out together: all, since a long row takes several passes."""
        return [list(lengths)]

    def cache_bytes(self, longest: int, window: int) -> int:
        """What the keys and values of a path take at most, beside windows of so many tokens."""
        held = self.attention.held
        reached = [min(longest, reach + KEY_BLOCK + window) if reach else longest for _, reach in held.values()]
        # The layer at work also has its keys gathered and moved, and there are two masks of 256 float32 rows.
        at_work = longest * (2 * max((size for size, _ in held.values()), default=0) + 2 * 2 * 256 * 4)
        return at_work + sum(size * tokens for (size, _), tokens in zip(held.values(), reached, strict=True))

    def lay_out(self, sequences: list[Sequence], budget: PassBudget) -> LaidOut:
        """Pack sequences, in passes within the budget."""
        tree = pack([self.classes.inputs(sequence) for sequence in sequences])
        rows = tuple(path[scored_positions(s)] for path, s in zip(tree.paths, sequences, strict=True))
        longest = int(tree.positions.max()) + 1
        tokens = budget.pass_tokens(tree.num_tokens, longest) if self.in_windows else tree.num_tokens
        return LaidOut(self._passes(cut(tree, tokens), longest), rows, tree.contributed)

    def _passes(self, windows: list[Window], longest: int) -> Iterator[Pass]:
        cache = PathCache(windows)
        for window in cache:
            with self.attention.over(window, self.device, cache):
                yield window.first, self._forward(window, longest)

    def _forward(self, window: Window, longest: int) -> torch.Tensor:
        positions = window.positions[window.num_cached :]
        # Rotary embeddings that go by the longest position must find it in every window: among the filling.
        filling = -window.num_tokens % ROWS or (ROWS if self.classes.original_positions else 0)
        states: torch.Tensor = self.backbone(
            input_ids=self._row(window.ids, filling, 0),
            position_ids=self._row(positions, filling, longest - 1),
            use_cache=False,
        )[0][0]
        return states[: window.num_tokens]

    def _row(self, values: IntArray, filling: int, value: int) -> torch.Tensor:
        """One row for the model, (1, tokens), filled up with tokens that nothing attends to."""
        padded = np.pad(values.astype(np.int64), (0, filling), constant_values=value)
        return torch.from_numpy(padded).to(self.device)[None]


class PaddedLayout:
    """One row a sequence, filled up on the right, where causal layers cannot see it.

    A sequence longer than a pass may be goes in windows, with the cache that transformers has for the model,
    if `in_windows`: not every model computes the same with it.
    """

    in_windows = False

    def __init__(self, loaded: LoadedModel, backbone: torch.nn.Module, classes: LengthClasses) -> None:
        self.device, self.backbone, self.classes = loaded.device, backbone, classes
        self.config = loaded.model.config
        self._cached_token_bytes = 0.0  # known once a sequence went in windows

    @property
    def windows(self) -> Windows:
        return {}

    def parts(self, lengths: dict[int, int], max_tokens: int) -> list[list[int]]:
        """Which sequences (of these lengths) are laid out together: similar ones, within `max_tokens` as padded."""
        parts: list[list[int]] = []
        for index in sorted(lengths, key=lambda index: -lengths[index]):
            if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > max_tokens:
                parts.append([])
            parts[-1].append(index)
        return parts

    def cache_bytes(self, longest: int, _window: int) -> int:
        """What transformers' cache takes at most; a layer is copied whenever it grows."""
        return int(1.5 * longest * self._cached_token_bytes)

    def lay_out(self, sequences: list[Sequence], budget: PassBudget) -> LaidOut:
        """Pad sequences to the longest of them; a single one goes in passes within the budget."""
        inputs = [self.classes.inputs(sequence) for sequence in sequences]
        lengths = np.array([len(ids) for ids in inputs], dtype=np.int32)
        longest = int(lengths.max())
        rows = tuple(
            np.arange(longest, dtype=np.int32)[scored_positions(s)] + np.int32(index * longest)
            for index, s in enumerate(sequences)
        )
        tokens = budget.pass_tokens(longest, longest)
        cut_up = self.in_windows and len(inputs) == 1 and tokens < longest
        passes = self._windows(inputs[0], tokens) if cut_up else self._whole(inputs, lengths)
        return LaidOut(passes, rows, lengths)

    def _whole(self, inputs: list[IntArray], lengths: IntArray) -> Iterator[Pass]:
        longest = int(lengths.max())
        ids = np.zeros((len(inputs), longest), dtype=np.int64)
        for row, sequence_ids in zip(ids, inputs, strict=True):
            row[: len(sequence_ids)] = sequence_ids
        # Without padding no mask is given: it is slower.
        mask = torch.from_numpy(np.arange(longest) < lengths[:, None]).long().to(self.device)
        states = self.backbone(
            input_ids=torch.from_numpy(ids).to(self.device),
            attention_mask=None if (lengths == longest).all() else mask,
            use_cache=False,
        )[0]
        yield 0, states.flatten(0, 1)

    def _windows(self, ids: IntArray, max_tokens: int) -> Iterator[Pass]:
        # Its name since transformers 5.22, and the one before.
        name = "cache" if "cache" in inspect.signature(self.backbone.forward).parameters else "past_key_values"
        cache = DynamicCache(config=self.config)
        for first in range(0, len(ids), max_tokens):
            window = torch.from_numpy(ids[first : first + max_tokens].astype(np.int64)).to(self.device)
            yield first, self.backbone(input_ids=window[None], **{name: cache}, use_cache=True)[0][0]
        self._cached_token_bytes = sum(map(nbytes_of, cache.layers)) / len(ids)


def nbytes_of(layer: object) -> int:
    """What one layer of a cache holds: keys and values, or the states of a recurrent layer."""
    return sum(held.nbytes for held in vars(layer).values() if isinstance(held, torch.Tensor))


def scored_positions(sequence: Sequence) -> slice:
    """The positions whose rows predict the completion: the last of the prompt to the last but one."""
    first = len(sequence.prompt) - 1
    return slice(first, first + len(sequence.completion))
