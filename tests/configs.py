"""A config.json small enough to be counted by hand."""

import json
from pathlib import Path
from typing import Any

SMALL = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "dtype": "bfloat16",
}  # fmt: skip
# Of each layer: queries and output 2 x 8 x 8, keys and values 2 x 8 x 4, feed-forward 3 x 8 x 16.
SMALL_LAYERS = 2 * (128 + 64 + 384)
SMALL_PARAMETERS = SMALL_LAYERS + 2 * 800


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the small configuration with some changes; returns its folder."""
    (folder / "config.json").write_text(json.dumps({**SMALL, **changes}))
    return folder
