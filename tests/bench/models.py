"""The models that benchmarks run: the embedded one on a CPU, a larger one of random weights on CUDA."""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from logprobd.engine.memory import plan_memory
from logprobd.engine.meter import meter_of
from logprobd.engine.model import find_device, load
from logprobd.engine.scorer import Scorer
from logprobd.engine.selftest import choose_scorer
from logprobd.settings import ModelSettings, Precision


def settings_for(model: str | None, precision: Precision | None, device: torch.device) -> ModelSettings:
    """What to load: on CUDA 1.6B random weights if no model is given, and bfloat16 if no precision is."""
    on_cuda = device.type == "cuda"
    return ModelSettings(
        model=str(large_random_model()) if on_cuda and model is None else model,
        precision=precision or ("bfloat16" if on_cuda else "float32"),
        devices=str(device),
    )


def large_random_model() -> Path:
    """A folder with a Llama of 1.6B random weights."""
    folder = Path(tempfile.gettempdir()) / "logprobd-bench-1.6b"
    if not (folder / "config.json").exists():
        config = LlamaConfig(
            vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=20, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=32_768, tie_word_embeddings=True,
        )  # fmt: skip
        torch.manual_seed(0)
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def small_random_llama(vocab_size: int, hidden_size: int = 256) -> LlamaForCausalLM:
    """Two layers, so that the vocabulary is what counts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=8192,
    )  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def our_scorer(settings: ModelSettings) -> Scorer:
    """As a worker has it: self-tested and with a memory plan."""
    device = find_device(settings.devices)
    meter = meter_of(device)
    scorer, _ = choose_scorer(load(settings, device, tell=lambda _: None))
    plan_memory(scorer, meter, None)
    return scorer


def stock_model(settings: ModelSettings) -> PreTrainedModel:
    """As a trainer has it: transformers' own attention, nothing of ours."""
    return load(settings, find_device(settings.devices), tell=lambda _: None).model
