"""What a model's config.json says of its size: parameters, layers and heads. Arithmetic only: no weights, no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Families whose matrices follow from the rules below; tests/test_shape.py counts a model of each.
DENSE = frozenset(
    {
        "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2",
        "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
    }
)  # fmt: skip
MIXTURES = frozenset({"mixtral", "olmoe", "qwen3_moe"})
TIED = frozenset({"cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3"})
"""Families whose head is the embedding unless their configuration says otherwise."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
CONFIG_FILE = "config.json"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "F32": 4, "BF16": 2, "F16": 2}
DEFAULT_ITEM_BYTES = 2

Config = Mapping[str, Any]


class UnknownShapeError(ValueError):
    """A configuration from which the size cannot be told; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's size. `active`: the parameters of all layers that one token meets, head and embedding left out.

    `query_size` is the heads' queries of a token together. `windows` has for each layer to how many keys a token
    attends at most; None: to all before it. `item_bytes` is the size of a parameter in the checkpoint.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    query_size: int
    vocab_size: int
    num_heads: int
    max_positions: int
    windows: tuple[int | None, ...]
    parameters: int
    active: int
    item_bytes: int

    @property
    def head(self) -> int:
        """The parameters of the language model head, which a scored row meets."""
        return self.hidden_size * self.vocab_size


@dataclass(frozen=True, slots=True)
class Stored:
    """What the headers of a folder's safetensors files say: numbers of parameters by tensor, and their dtypes."""

    parameters: dict[str, int]
    dtypes: dict[str, int]


def read_shape(model: Path, parameters: float | None = None, active: float | None = None) -> Shape:
    """The shape of the model in a folder, or of a config.json by itself; raises UnknownShapeError if it is unclear.

    Parameters are those of the safetensors files beside it, else counted from the configuration, for the families
    above (norms and biases left out, under 0.1 %). What is given goes before either.
    """
    config_file = model / CONFIG_FILE if model.is_dir() else model
    config, stored = read_config(config_file), read_stored(config_file.parent)
    hidden, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    total = parameters or (sum(stored.parameters.values()) if stored else count(config))
    return Shape(
        family=family_of(config),
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size", "moe_intermediate_size"),
        query_size=heads * head_dim(config),
        vocab_size=whole(config, "vocab_size"),
        num_heads=heads,
        max_positions=whole(config, "max_position_embeddings"),
        windows=windows_of(config),
        parameters=int(total),
        active=int(active or active_of(config, int(total))),
        item_bytes=item_bytes(config, stored),
    )


def read_config(config_file: Path) -> Config:
    """A configuration; that of the text model where it is one of several."""
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownShapeError(f"{config_file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnknownShapeError(f"{config_file} holds no JSON object")
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def read_stored(folder: Path) -> Stored | None:
    """The headers of the folder's safetensors files: eight bytes of length, then JSON; None where there are none."""
    parameters: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        except (OSError, ValueError, OverflowError) as error:
            raise UnknownShapeError(f"{path} has no readable safetensors header: {error}") from None
        for name, tensor in header.items():
            if name != "__metadata__":
                number = math.prod(tensor["shape"])
                parameters[name] = number
                dtypes[tensor["dtype"]] = dtypes.get(tensor["dtype"], 0) + number
    return Stored(parameters, dtypes) if parameters else None


def count(config: Config) -> int:
    """All parameters of matrices, of a family that is known."""
    every = whole(config, *EXPERTS) if family_of(config) in MIXTURES else 1
    return layers(config, every) + embeddings(config)


def active_of(config: Config, total: int) -> int:
    """The parameters of the layers that one token meets."""
    if family_of(config) in DENSE | MIXTURES:
        return layers(config, whole(config, "num_experts_per_tok") if family_of(config) in MIXTURES else 1)
    if any(config.get(name) for name in EXPERTS):
        raise UnknownShapeError(
            f"how much of a {family_of(config)} model a token meets is not known: give --active-parameters"
        )
    return total - embeddings(config)


def layers(config: Config, experts: int) -> int:
    """The parameters of all layers with so many experts in each (1 for a dense model)."""
    family, hidden = family_of(config), whole(config, "hidden_size")
    if family not in DENSE | MIXTURES:
        raise UnknownShapeError(
            f"a {family} model is not counted from its configuration: give --parameters (and --active-parameters for "
            "a mixture of experts), or a folder with its safetensors files"
        )
    number, sparse = whole(config, "num_hidden_layers"), sparse_layers(config)
    attention = 2 * hidden * (whole(config, "num_attention_heads") + key_value_heads(config)) * head_dim(config)
    block = 3 * hidden  # gate, up and down
    router = hidden * whole(config, *EXPERTS) if sparse else 0
    of_experts = sparse * (experts * block * expert_size(config) + router)
    dense = (number - sparse) * block * whole(config, "intermediate_size") if number > sparse else 0
    return number * attention + of_experts + dense


def sparse_layers(config: Config) -> int:
    """How many layers are mixtures of experts."""
    if family_of(config) not in MIXTURES:
        return 0
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return sum(layer not in dense and (layer + 1) % step == 0 for layer in range(whole(config, "num_hidden_layers")))


def embeddings(config: Config) -> int:
    """The parameters of the embedding, and of the head where that is another matrix."""
    tied = config.get("tie_word_embeddings", family_of(config) in TIED)
    return whole(config, "hidden_size") * whole(config, "vocab_size") * (1 if tied else 2)


def windows_of(config: Config) -> tuple[int | None, ...]:
    """For each layer, to how many keys a token attends at most, where `layer_types` says which layers slide."""
    num_layers, window = whole(config, "num_hidden_layers"), config.get("sliding_window")
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def item_bytes(config: Config, stored: Stored | None) -> int:
    """Bytes of a parameter as most of the checkpoint has it."""
    if stored is not None:
        return ITEM_BYTES.get(max(stored.dtypes, key=stored.dtypes.__getitem__), DEFAULT_ITEM_BYTES)
    return ITEM_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), DEFAULT_ITEM_BYTES)


def expert_size(config: Config) -> int:
    """The width of an expert."""
    return whole(config, "moe_intermediate_size", "intermediate_size")


def key_value_heads(config: Config) -> int:
    return whole(config, "num_key_value_heads", "num_attention_heads")


def head_dim(config: Config) -> int:
    if config.get("head_dim"):
        return whole(config, "head_dim")
    return whole(config, "hidden_size") // whole(config, "num_attention_heads")


def family_of(config: Config) -> str:
    return str(config.get("model_type"))


def whole(config: Config, *names: str) -> int:
    """The first of these numbers that the configuration has."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise UnknownShapeError(f"the configuration of a {family_of(config)} model has no number {' or '.join(names)}")
