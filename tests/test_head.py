"""The head of a model apart from its backbone: with all that families do to their logits."""

from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from logprobd.engine.head import ModelHead, NoBackboneError, find_backbone, replace_module
from oracle import tiny_llama, tiny_sizes

VOCAB = 211


def tiny_gemma2() -> PreTrainedModel:
    """With a cap on its logits that bites."""
    config = Gemma2Config(vocab_size=VOCAB, head_dim=16, final_logit_softcapping=1.5, **tiny_sizes(), **wide())
    return Gemma2ForCausalLM(config)


def tiny_cohere() -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(vocab_size=VOCAB, logit_scale=0.25, **tiny_sizes(), **wide()))


def tiny_granite() -> PreTrainedModel:
    return GraniteForCausalLM(GraniteConfig(vocab_size=VOCAB, logits_scaling=3.0, **tiny_sizes(), **wide()))


def wide() -> dict[str, Any]:
    return {"initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


FAMILIES = {"gemma2": tiny_gemma2, "cohere": tiny_cohere, "granite": tiny_granite, "llama": tiny_llama}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = FAMILIES[request.param]()
    made.eval().requires_grad_(False)
    return made


def some_ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, 23), generator=torch.Generator().manual_seed(1))


def hidden_states(model: PreTrainedModel) -> torch.Tensor:
    hidden: torch.Tensor = model.get_decoder()(input_ids=some_ids())[0][0]
    return hidden


def modules_and_parameters(model: PreTrainedModel) -> tuple[list[int], list[int]]:
    return [id(module) for module in model.modules()], [id(parameter) for parameter in model.parameters()]


def test_the_head_gives_the_logits_of_the_model(model: PreTrainedModel) -> None:
    own = model(input_ids=some_ids()).logits[0]
    logits = ModelHead(model)(hidden_states(model))

    assert own.std() > 0.2
    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)


def test_families_do_more_than_a_product_with_their_weight(model: PreTrainedModel) -> None:
    product = hidden_states(model) @ model.get_output_embeddings().weight.T
    off_by = float((ModelHead(model)(hidden_states(model)) - product).abs().max())

    assert (off_by > 0.1) == (model.config.model_type != "llama")


@pytest.mark.parametrize("rows", [[0], [5, 2], [7, 7, 7], list(range(22, -1, -1))])
def test_any_rows_in_any_order_may_be_asked_for(model: PreTrainedModel, rows: list[int]) -> None:
    own = model(input_ids=some_ids()).logits[0]
    logits = ModelHead(model)(hidden_states(model)[rows])

    assert logits.shape == (len(rows), VOCAB)
    torch.testing.assert_close(logits, own[rows], rtol=1e-5, atol=1e-5)


def test_the_model_stays_as_it_was(model: PreTrainedModel) -> None:
    before, own = modules_and_parameters(model), model(input_ids=some_ids()).logits
    head = ModelHead(model, torch.float64)
    head(hidden_states(model))

    assert modules_and_parameters(model) == before
    assert model.get_decoder() is head.backbone
    assert torch.equal(model(input_ids=some_ids()).logits, own)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_head_sees_weights_that_change_in_place(model: PreTrainedModel) -> None:
    head = ModelHead(model)
    hidden = hidden_states(model)
    before = head(hidden)
    model.get_output_embeddings().weight.mul_(0.5)

    assert not torch.allclose(head(hidden), before, atol=0.05)


def test_a_float32_head_on_a_bfloat16_model_is_computed_in_float32(model: PreTrainedModel) -> None:
    torch.nn.Module.to(model, torch.bfloat16)
    hidden = hidden_states(model)
    exact = ModelHead(model.__class__(model.config).eval().double())
    exact._model.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()}, strict=False)
    expected = exact(hidden.double())
    in_float32, in_bfloat16 = ModelHead(model, torch.float32)(hidden), ModelHead(model)(hidden)

    assert (in_float32.dtype, in_bfloat16.dtype) == (torch.float32, torch.bfloat16)
    assert (in_float32 - expected).abs().max() < 1e-4
    assert (in_bfloat16 - expected).abs().max() > 1e-3
    assert model.get_output_embeddings().weight.dtype == torch.bfloat16


def test_the_hidden_rows_are_not_kept(model: PreTrainedModel) -> None:
    head = ModelHead(model)
    head(hidden_states(model))

    assert head._stub.hidden is None


def test_the_backbone_is_not_found_under_the_head(model: PreTrainedModel) -> None:
    head = ModelHead(model)

    assert all(module is not head.backbone for module in head._model.modules())
    assert any(module is head.backbone for module in model.modules())


def test_a_backbone_called_transformer_is_found() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)).eval()

    assert find_backbone(model) is model.transformer


def test_a_model_whose_decoder_is_itself_is_refused() -> None:
    with pytest.raises(NoBackboneError, match="LlamaModel has no decoder apart from its head"):
        ModelHead(tiny_llama().model)


def test_only_the_path_to_the_replaced_module_is_copied() -> None:
    inner, other, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Identity()
    root = torch.nn.Sequential(torch.nn.Sequential(inner), other)
    replaced = replace_module(root, inner, new)

    assert isinstance(replaced, torch.nn.Sequential)
    assert list(replaced.modules())[-2:] == [new, other]
    assert inner in root.modules()
    assert new not in root.modules()
