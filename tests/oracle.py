"""Independent answers for tests: a model's own forward, attention with a dense mask, tiny random models.

Nothing of the engine computes these numbers; they are float64 wherever the model's own code lets them be.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from logprobd.engine.model import LoadedModel, Source, describe, prepare
from logprobd.engine.packing import PrefixTree
from logprobd.messages import TokenizerInfo
from logprobd.sequences import Candidates, IntArray, Options, Sequence
from logprobd.settings import ModelSettings

FloatArray64 = NDArray[np.float64]

CPU = torch.device("cpu")

POLICY_WORDS = 97


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model attends by transformers' own code, also where a Scorer has put ours in place."""
    current = model.config._attn_implementation
    if not current.startswith("logprobd"):
        yield
        return
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(current)


@torch.no_grad()
def own_logits(model: PreTrainedModel, prompt: Seq[int] | IntArray, completion: Seq[int] | IntArray) -> torch.Tensor:
    """The logits (n, vocab_size) that predict a completion of n tokens, computed alone, as float64."""
    ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    with own_attention(model):
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].double()
    return logits[len(prompt) - 1 : len(ids) - 1]


def own_distribution(
    model: PreTrainedModel, prompt: IntArray, completion: IntArray, temperature: float = 1.0
) -> FloatArray64:
    """The log-softmax rows (n, vocab_size) that predict a completion of n tokens, computed alone."""
    scored = own_logits(model, prompt, completion)
    scored = (scored - scored.amax(dim=-1, keepdim=True)) / temperature
    rows: FloatArray64 = scored.log_softmax(dim=-1).numpy()
    return rows


def own_logprobs(
    model: PreTrainedModel, prompt: IntArray, completion: IntArray, temperature: float = 1.0
) -> FloatArray64:
    """The logprob of every completion token, by the model's own forward on this one sequence."""
    rows = own_distribution(model, prompt, completion, temperature)
    chosen: FloatArray64 = rows[np.arange(len(completion)), completion]
    return chosen


def entropies(rows: FloatArray64) -> FloatArray64:
    """The entropy in nats of each row of logprobs."""
    finite = np.where(rows == -np.inf, 0, rows)
    sums: FloatArray64 = np.where(rows == -np.inf, 0, np.exp(rows) * finite).sum(axis=-1)
    return -sums


def dense_tree_mask(positions: IntArray, subtree_end: IntArray, window: int | None) -> NDArray[np.bool_]:
    """Which token q (row) sees which token k (column)."""
    token = np.arange(len(positions))
    seen = (token[None, :] <= token[:, None]) & (token[:, None] < subtree_end[None, :])
    if window is not None:
        seen &= positions[:, None] - positions[None, :] < window
    return seen


def dense_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: PrefixTree,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in float64 under the whole mask; shapes as in attention.TreeKernel."""
    per_kv = query.shape[0] // key.shape[0]
    key, value = (tensor.double().repeat_interleave(per_kv, dim=0) for tensor in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.from_numpy(dense_tree_mask(tree.positions, tree.subtree_end, window))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : key.shape[1]]
    return (probabilities @ value).transpose(0, 1)


def tiny_llama(vocab_size: int = 211, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A small random Llama whose logits vary (a standard deviation of about 2)."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        **{**tiny_sizes(), "initializer_range": 0.25, "tie_word_embeddings": False, **changes},
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def save_tiny_policy(folder: Path) -> Path:
    """A random Llama that a trainer can load: with a tokenizer of the words w0, w1 … and its special tokens."""
    words = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(POLICY_WORDS))]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    tiny_llama(len(words), pad_token_id=0, bos_token_id=1, eos_token_id=2).save_pretrained(folder)
    return folder


def tiny_longrope_phi3(vocab_size: int = 211) -> PreTrainedModel:
    """Rotates otherwise once a sequence has more than 32 tokens."""
    torch.manual_seed(0)
    half = tiny_sizes()["hidden_size"] // tiny_sizes()["num_attention_heads"] // 2
    config = Phi3Config(
        vocab_size=vocab_size,
        **tiny_sizes(),
        initializer_range=0.25,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * half,
            "long_factor": [4.0 + place for place in range(half)],
            "original_max_position_embeddings": 32,
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: PreTrainedModel = Phi3ForCausalLM(config).eval()
    return model


def tiny_sizes() -> dict[str, Any]:
    """The sizes that most families' configurations share."""
    return {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }


def loaded(model: PreTrainedModel, settings: ModelSettings | None = None) -> LoadedModel:
    """A model in memory as the engine holds a model that it loaded."""
    source = Source("tiny", "tiny")
    return describe(prepare(model, CPU), source, settings or ModelSettings(), CPU, TokenizerInfo(None, None))


def ids_of(tokens: Seq[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def sequence_of(
    prompt: Seq[int],
    completion: Seq[int],
    options: Options | None = None,
    candidates: Candidates | None = None,
) -> Sequence:
    return Sequence(ids_of(prompt), ids_of(completion), options or Options(), candidates)
