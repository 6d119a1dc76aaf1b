"""Which layout the self-test chooses for which model, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from logprobd.engine.layouts import SharedLayout
from logprobd.engine.model import ModelRefusedError
from logprobd.engine.scorer import Scorer
from logprobd.engine.selftest import MAX_ERROR_FLOAT32, choose_scorer, small_tree
from logprobd.messages import SelfTest
from logprobd.sequences import Scores
from oracle import loaded, own_attention, own_logprobs, sequence_of, tiny_llama, tiny_sizes

VOCAB = 211


def chosen_for(model: PreTrainedModel) -> tuple[Scorer, SelfTest]:
    return choose_scorer(loaded(model.eval()))


def assert_scores_well(scorer: Scorer) -> None:
    sequences = [sequence_of([1, 2, 3], [4, 5, 6]), sequence_of([1, 2, 3], [4, 7]), sequence_of([9], [8])]
    for sequence, outcome in zip(sequences, scorer.score(sequences), strict=True):
        assert isinstance(outcome, Scores)
        own = own_logprobs(scorer.model, sequence.prompt, sequence.completion)
        assert np.abs(outcome.logprobs - own).max() < 1e-4


def tiny_mamba() -> PreTrainedModel:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.3)
    return MambaForCausalLM(config)


def tiny_bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3))


def tiny_llama4() -> PreTrainedModel:
    """With layers that attend within chunks of 512 tokens: longer than what the self-test tries."""
    config = Llama4TextConfig(
        vocab_size=VOCAB,
        **tiny_sizes(),
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=2,
        attention_chunk_size=512,
        layer_types=["chunked_attention", "full_attention"],
        pad_token_id=0,
    )
    return Llama4ForCausalLM(config)


def tiny_gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(config)


def tiny_mistral(window: int | None) -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(vocab_size=VOCAB, **tiny_sizes(), sliding_window=window, initializer_range=0.25)
    )


class DependsOnLength(LlamaForCausalLM):
    """Its logits grow with the number of tokens in the pass, so no other layout gives the same."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits *= 1 + 0.01 * output.logits.shape[1]
        return output


class LooksAhead(LlamaForCausalLM):
    """Its head adds to each row a little of the next one: wrong wherever rows are taken out of a sequence."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.1 * output.logits.roll(-1, dims=1)
        return output


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2, lambda: tiny_mistral(None), lambda: tiny_mistral(20)])
def test_a_plain_transformer_is_served_in_the_shared_layout(make: Any) -> None:
    torch.manual_seed(0)
    scorer, selftest = chosen_for(make())

    assert (scorer.layout, selftest.layout) == ("shared", "shared")
    assert_scores_well(scorer)


@pytest.mark.parametrize("make", [tiny_mamba, tiny_bloom, tiny_llama4])
@pytest.mark.filterwarnings("ignore:.*fast path is not available.*")
def test_a_model_that_a_tree_does_not_suit_is_served_padded(make: Any) -> None:
    torch.manual_seed(0)
    scorer, selftest = chosen_for(make())

    assert (scorer.layout, selftest.layout) == ("padded", "padded")
    assert selftest.reason
    assert selftest.max_error <= MAX_ERROR_FLOAT32
    assert_scores_well(scorer)


def test_recurrent_layers_are_told_by_their_numbers() -> None:
    torch.manual_seed(0)
    _, selftest = chosen_for(tiny_mamba())

    assert selftest.reason.startswith("off by up to ")
    assert selftest.shared_max_error is not None
    assert selftest.shared_max_error > MAX_ERROR_FLOAT32
    assert all("does not attend through the interface" in line for line in selftest.layers)


def test_chunked_attention_is_told_by_its_configuration() -> None:
    torch.manual_seed(0)
    _, selftest = chosen_for(tiny_llama4())

    assert selftest.reason == "layers of kind chunked_attention"


def test_a_model_that_is_padded_has_its_own_attention_back() -> None:
    torch.manual_seed(0)
    model = tiny_bloom()
    before = model.config._attn_implementation
    chosen_for(model)

    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", [DependsOnLength, LooksAhead])
def test_a_model_that_is_wrong_in_both_layouts_is_refused_by_name(family: type[LlamaForCausalLM]) -> None:
    torch.manual_seed(0)
    model = family(tiny_llama().config)

    with pytest.raises(ModelRefusedError, match=r"tiny \(llama\) gives wrong numbers in every layout: shared: off by"):
        chosen_for(model)


def test_a_model_of_nan_is_refused() -> None:
    model = tiny_llama()
    model.lm_head.weight.data[7] = float("nan")

    with pytest.raises(ModelRefusedError, match="NaN"):
        chosen_for(model)


def test_the_report_says_what_was_measured() -> None:
    _, selftest = chosen_for(tiny_llama())

    assert 0 < selftest.mean_error < selftest.max_error < 1e-4
    assert 0 < selftest.max_entropy_error < 1e-4
    assert selftest.shared_max_error == selftest.max_error
    assert selftest.reason == "every layer attends over the prefix tree"
    assert selftest.layers == ("0-1: attends over the tree",)


def test_the_report_names_the_windows_of_layers() -> None:
    torch.manual_seed(0)
    _, selftest = chosen_for(tiny_mistral(20))

    assert selftest.layers == ("0-1: attends over the tree, window 20",)


def test_a_window_that_never_reaches_the_attention_function_is_found() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, **tiny_sizes(), use_sliding_window=True, sliding_window=300, max_window_layers=0
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    _, selftest = chosen_for(model)

    assert selftest.layout == "padded"
    assert selftest.reason == "layers with a window of 300 do not say so to the attention function"


def test_the_tree_of_the_self_test_branches_and_fits_a_short_model() -> None:
    sequences = small_tree(VOCAB, 1000)
    shortened = small_tree(VOCAB, 16)

    assert any(len(sequence.prompt) == 1 for sequence in sequences)
    assert len({tuple(sequence.prompt[:20]) for sequence in sequences}) < len(sequences)
    assert max(sequence.num_tokens for sequence in shortened) <= 16
    assert all(len(sequence.prompt) for sequence in shortened)


def test_the_oracle_uses_the_models_own_attention() -> None:
    model = tiny_llama()
    scorer, _ = chosen_for(model)
    ours = model.config._attn_implementation
    with own_attention(model):
        own = model.config._attn_implementation

    assert isinstance(scorer.laying, SharedLayout)
    assert (own, ours) == ("sdpa", scorer.laying.attention.name)
    assert model.config._attn_implementation == ours
