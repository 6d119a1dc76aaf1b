"""TRL's own fused head, where TRL is installed: `model(..., labels=..., fused_lm_head=True).log_probs`.

Nothing of TRL is needed for the other methods, so it is imported only when this one is asked for. Run against trl
1.16.0, which scores every position on a CPU and, where Triton is, the completions' only. To have it:

    .venv/bin/pip install -c constraints.txt trl==1.16.0
"""

import importlib.util
from typing import Any

from transformers import PreTrainedModel

from bench.stock import Scored, padded
from logprobd.sequences import Sequence

TRL_FUSED = "padded, TRL's own fused head"
IGNORED = -100  # the label of what is not scored


def is_installed() -> bool:
    return importlib.util.find_spec("trl") is not None


def trl_fused(model: PreTrainedModel, sequences: list[Sequence]) -> Scored:
    """Padded batches as GRPOTrainer gives them to its reference model."""
    add_head(model)
    forward: Any = model
    scored = []
    for batch in padded(model, sequences):
        labels = batch.ids.masked_fill(batch.mask == 0, IGNORED)
        labels[:, : batch.first] = IGNORED
        output = forward(input_ids=batch.ids, attention_mask=batch.mask, labels=labels, fused_lm_head=True)
        scored += batch.unpadded(output.log_probs[:, batch.first - 1 :])
    return scored


def add_head(model: PreTrainedModel) -> None:
    """Once a model; without `fused_lm_head=True` its forward stays what it was."""
    if not hasattr(model, "trl_head"):
        module: Any = importlib.import_module("trl.trainer.utils")
        module.add_fused_lm_head(model)
        model.trl_head = True  # type: ignore[assignment]
