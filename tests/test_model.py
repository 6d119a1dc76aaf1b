"""Loading: safetensors by path, GGUF converted once, pickles and foreign code refused, an identity that tells apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from logprobd.engine.gguf import embedded_gguf, folder_of_gguf, split_digits
from logprobd.engine.head import ModelHead
from logprobd.engine.model import ModelRefusedError, fingerprint, load
from logprobd.settings import ModelSettings
from logprobd.tokenizer import Tokenizer
from oracle import CPU, tiny_llama


def load_folder(folder: Path, **options: object) -> object:
    return load(ModelSettings(model=str(folder), **options), CPU)  # type: ignore[arg-type]


def test_a_folder_is_loaded_and_named_after_itself(tiny_folder: Path) -> None:
    loaded = load(ModelSettings(model=str(tiny_folder)), CPU)

    assert loaded.info.id == tiny_folder.name
    assert loaded.info.vocab_size == 211
    assert loaded.info.max_positions == 512
    assert loaded.tokenizer.json is None
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize(
    ("precision", "dtype", "named"),
    [
        ("auto", torch.float32, "float32"),
        ("bfloat16", torch.bfloat16, "bfloat16"),
        ("float16", torch.float16, "float16"),
        ("autocast", torch.float32, "autocast"),
    ],
)
def test_the_precision_is_that_of_the_weights(
    tiny_folder: Path, precision: str, dtype: torch.dtype, named: str
) -> None:
    loaded = load(ModelSettings.model_validate({"model": str(tiny_folder), "precision": precision}), CPU)

    assert next(loaded.model.parameters()).dtype == dtype
    assert loaded.info.precision == named


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@torch.inference_mode()
def test_a_float32_head_computes_in_float32_under_any_precision(tiny_folder: Path, precision: str) -> None:
    given = {"model": str(tiny_folder), "precision": precision, "head_precision": "float32"}
    loaded = load(ModelSettings.model_validate(given), CPU)
    weight = loaded.model.get_output_embeddings().weight
    hidden = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=loaded.autocast):
        logits = ModelHead(loaded.model, loaded.head_dtype)(hidden)

    assert loaded.info.head_precision == "float32"
    assert logits.dtype == torch.float32
    assert (logits - hidden.double() @ weight.double().T).abs().max() < 1e-5


def test_the_fingerprint_follows_every_weight_and_the_configuration() -> None:
    same, again = tiny_llama(seed=1), tiny_llama(seed=1)
    other, scaled = tiny_llama(seed=2), tiny_llama(seed=1, rope_theta=20_000.0)
    swapped = tiny_llama(seed=1)
    with torch.no_grad():
        weight = swapped.model.layers[0].mlp.up_proj.weight
        weight[[0, 1]] = weight[[1, 0]].clone()

    assert fingerprint(same) == fingerprint(again)
    assert len({fingerprint(model) for model in (same, other, scaled, swapped)}) == 4


def test_the_fingerprint_does_not_follow_the_place(tiny_folder: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(tiny_folder, tmp_path / "elsewhere")
    here, there = (load(ModelSettings(model=str(folder)), CPU).info for folder in (tiny_folder, elsewhere))

    assert here.fingerprint == there.fingerprint


def test_code_that_a_folder_brings_is_not_run(tiny_folder: Path, tmp_path: Path) -> None:
    folder, mark = shutil.copytree(tiny_folder, tmp_path / "model"), tmp_path / "mark"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "marker", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    with pytest.raises(ModelRefusedError):
        load_folder(folder)

    assert not mark.exists()


def test_broken_weights_are_refused_with_a_reason(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelRefusedError, match="cannot be loaded"):
        load_folder(folder)


def test_a_checkpoint_that_lacks_weights_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match=r"lacks 1 weights, model.layers.1.mlp.up_proj.weight"):
        load_folder(folder)


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere", "~/nowhere", "nowhere.gguf"])
def test_a_place_that_does_not_exist_is_refused(model: str) -> None:
    with pytest.raises(ModelRefusedError, match="does not exist"):
        load(ModelSettings(model=model), CPU)


def test_a_tokenizer_that_does_not_exist_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="--tokenizer"):
        load_folder(tiny_folder, tokenizer=str(tmp_path))


def test_a_converted_gguf_is_found_again(embedded_folder: Path, tmp_path: Path) -> None:
    gguf = embedded_gguf()
    told: list[str] = []
    assert gguf is not None
    again = folder_of_gguf(gguf, embedded_folder.parent, tell=told.append)

    assert again == embedded_folder
    assert told == []
    assert not list(embedded_folder.parent.glob(".SmolLM2*"))


def test_every_digit_is_a_token_of_its_own(embedded_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)

    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_splitting_digits_keeps_the_rest_of_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}))
    split_digits(path)
    written = json.loads(path.read_text())

    assert written["model"] == {"type": "BPE"}
    assert [step["type"] for step in written["pre_tokenizer"]["pretokenizers"]] == ["Digits", "ByteLevel"]


def test_the_tokenizer_travels_as_text(embedded_folder: Path) -> None:
    loaded = load(ModelSettings(model=str(embedded_folder)), CPU)
    ours, theirs = Tokenizer(loaded.tokenizer), AutoTokenizer.from_pretrained(embedded_folder)
    text = "Numbers like 1234,  tabs\t and 東京 😀 <|im_start|>user"

    assert ours.encode_prompt(text).tolist() == theirs(text)["input_ids"]
