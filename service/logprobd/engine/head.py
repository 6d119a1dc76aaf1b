"""The model's own head, applied to hidden rows of our choice.

A hand-written `hidden @ weight.T` misses what many families do to their logits (Gemma's softcap, Cohere's
scale, Granite's divisor, Falcon-H1's multiplier ...). So the model's own forward is called, in a shallow
copy whose backbone is a stub that returns the given rows.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from logprobd.engine.ranks import ALONE, Ranks, held, vocabulary_of


class NoBackboneError(Exception):
    """The model has no decoder that can be told from its head."""


class ModelHead:
    """Calls the head of a causal language model on hidden rows.

    `dtype` runs the head in another precision than the model's (under autocast, than that), on a copy of its weight
    where it has another dtype. Of a head that is sharded over `ranks`, only the logits of this process's own part of
    the `vocabulary` are computed.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None, ranks: Ranks = ALONE) -> None:
        self.backbone = find_backbone(model)
        self._stub = _Stub(self.backbone)
        self._model: Any = replace_module(model, self.backbone, self._stub)
        self._dtype = dtype
        projection: Any = model.get_output_embeddings()
        self.vocabulary = vocabulary_of(getattr(projection, "weight", None), ranks)
        if self.vocabulary.ranks.size > 1:
            self._model = replace_module(self._model, projection, own_part(projection, dtype))
        elif dtype is not None and projection is not None and projection.weight.dtype != dtype:
            self._model = replace_module(self._model, projection, copy.deepcopy(projection).to(dtype))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (rows, vocab_size), as the model returns them, of hidden states (rows, hidden_size)."""
        self._stub.hidden = hidden[None] if self._dtype is None else hidden[None].to(self._dtype)
        try:
            ids = torch.zeros((1, hidden.shape[0]), dtype=torch.long, device=hidden.device)
            with self._own_precision(hidden.device):
                logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._stub.hidden = None
        return logits

    def _own_precision(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext() if self._dtype is None else torch.autocast(device.type, enabled=False)


def own_part(projection: torch.nn.Linear, dtype: torch.dtype | None) -> torch.nn.Linear:
    """The rows that this process holds of a sharded projection; transformers' own would gather all logits."""
    weight = held(projection.weight)
    part = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=projection.bias is not None, device="meta")
    part.weight = torch.nn.Parameter(weight if dtype is None else weight.to(dtype), requires_grad=False)
    if projection.bias is not None:
        bias = held(projection.bias)
        part.bias = torch.nn.Parameter(bias if dtype is None else bias.to(dtype), requires_grad=False)
    return part


class _StubOutput(BaseModelOutputWithPast):
    """A backbone's output of which only the hidden states exist; every other attribute reads as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(torch.nn.Module):
    """Stands where the backbone stood and returns the rows it was given."""

    hidden: torch.Tensor | None

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = None
        # Past nn.Module's own bookkeeping: the backbone must not be found under the stub.
        object.__setattr__(self, "_backbone", backbone)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_backbone"), name)

    def forward(self, *_args: Any, **_kwargs: Any) -> BaseModelOutputWithPast:
        return _StubOutput(last_hidden_state=self.hidden)


def find_backbone(model: PreTrainedModel) -> torch.nn.Module:
    """The decoder under the head: the module whose last hidden states the head reads."""
    decoder: torch.nn.Module = model.get_decoder()
    if decoder is not model and isinstance(decoder, PreTrainedModel):
        return decoder
    # Llama 4 knows itself under another name, and ModernBERT's `decoder` is its head.
    inside = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    if len(inside) != 1:
        raise NoBackboneError(f"{type(model).__name__} has no decoder apart from its head")
    return inside[0]


def replace_module(root: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> torch.nn.Module:
    """A shallow copy of `root` in which `old`, found by identity, is `new`; `root` stays as it is."""
    if root is old:
        return new
    children = {
        name: replace_module(child, old, new) if child is not None and contains(child, old) else child
        for name, child in root._modules.items()
    }
    replaced = copy.copy(root)
    replaced._modules = children
    return replaced


def contains(root: torch.nn.Module, wanted: torch.nn.Module) -> bool:
    return any(module is wanted for module in root.modules())
