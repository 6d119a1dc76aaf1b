"""What a config.json says of a model's size: as many parameters as the model has, or a clear refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import SMALL, SMALL_LAYERS, SMALL_PARAMETERS, write_config
from families import FAMILIES, Family
from logprobd.shape import DENSE, MIXTURES, UnknownShapeError, count, read_shape


def counted_families() -> list[Family]:
    return [family for family in FAMILIES if family.config().model_type in DENSE | MIXTURES]


@pytest.mark.parametrize("family", counted_families(), ids=lambda family: family.name)
def test_a_configuration_has_as_many_parameters_as_its_model(family: Family) -> None:
    config = family.config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)

    assert count(config.to_dict()) == matrices


def test_every_counted_family_is_tried() -> None:
    assert {family.config().model_type for family in counted_families()} == DENSE | MIXTURES


def test_the_parameters_of_a_small_model(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path))

    assert shape.parameters == SMALL_PARAMETERS
    assert shape.active == SMALL_LAYERS
    assert shape.head == 800
    assert shape.item_bytes == 2


def test_a_token_meets_only_its_experts(tmp_path: Path) -> None:
    shape = read_shape(
        write_config(tmp_path, model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=4)
    )
    attention, expert, router = 128 + 64, 3 * 8 * 4, 8 * 6

    assert shape.parameters == 2 * (attention + 6 * expert + router) + 2 * 800
    assert shape.active == 2 * (attention + 2 * expert + router)


def test_some_layers_of_a_mixture_are_dense(tmp_path: Path) -> None:
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "mlp_only_layers": [0]}
    shape = read_shape(write_config(tmp_path, model_type="qwen3_moe", **mixture))

    assert shape.active == 2 * (128 + 64) + 3 * 8 * 16 + 2 * 3 * 8 * 4 + 8 * 6


def test_a_folder_with_weights_is_counted_exactly(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    shape = read_shape(tiny_folder)

    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.item_bytes == 4


def test_the_text_model_of_several_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "both", "text_config": SMALL}))

    assert read_shape(tmp_path).parameters == SMALL_PARAMETERS


def test_what_is_given_goes_before_what_is_counted(tmp_path: Path) -> None:
    shape = read_shape(write_config(tmp_path, model_type="new"), parameters=5000.0)

    assert shape.parameters == 5000
    assert shape.active == 5000 - 1600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "new"}, "--parameters"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_a_configuration_that_does_not_say_enough_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnknownShapeError, match=message):
        read_shape(write_config(tmp_path, **changes))


def test_an_unknown_mixture_needs_its_active_parameters(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_type="new", num_experts=4)
    with pytest.raises(UnknownShapeError, match="--active-parameters"):
        read_shape(folder, parameters=5000.0)

    assert read_shape(folder, parameters=5000.0, active=900.0).active == 900


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(UnknownShapeError, match=r"config\.json"):
        read_shape(tmp_path)


def test_a_broken_weights_file_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    (folder / "model.safetensors").write_bytes(b"\x04\0\0\0\0\0\0\0nope")

    with pytest.raises(UnknownShapeError, match=r"model\.safetensors"):
        read_shape(folder)
