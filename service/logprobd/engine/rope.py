"""Which sequences may share a forward pass: some rotary embeddings depend on the sequence's length.

Phi-3's longrope takes other factors for the whole sequence once it is longer than the original context.
In a batch of several lengths the longest would decide for all of them, so sequences of different length
classes are never computed together. (Dynamic NTK scaling changes only beyond the model's longest
sequence, which is not served.)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from logprobd.sequences import IntArray, Sequence


@dataclass(frozen=True, slots=True)
class LengthClasses:
    """Two classes: up to `original_positions` tokens, and longer; one where that is None."""

    original_positions: int | None

    def __call__(self, num_tokens: int) -> int:
        return int(self.original_positions is not None and num_tokens > self.original_positions)

    def inputs(self, sequence: Sequence) -> IntArray:
        """What of a sequence goes through the model: its last token predicts nothing that is asked.

        Where positions are encoded by the sequence's length it goes all the same, as in the model's own forward.
        """
        keeps_last = self.original_positions is not None
        return np.concatenate([sequence.prompt, sequence.completion if keeps_last else sequence.completion[:-1]])


def length_classes(config: PreTrainedConfig) -> LengthClasses:
    """The length classes of a model, from its rotary embedding's type."""
    text = config.get_text_config(decoder=True)
    for parameters in rope_parameters(text):
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            return LengthClasses(original or text.original_max_position_embeddings)
    return LengthClasses(None)


def rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The model's rotary parameters: one set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
