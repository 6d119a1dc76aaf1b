"""DPO with a remote reference: its sums are computed before training, by the service, and cached under its name."""

from typing import Any

import torch
import trl
from accelerate.utils import parse_flag_from_env
from packaging.version import Version
from trl import DPOTrainer

from logprobd_client.trl.identity import COMPARED
from logprobd_client.trl.reference import RemoteReference, Rows, Service, timeout_within
from logprobd_client.trl.waiting import in_thread, on_all_ranks, within

OLDEST = Version("1.16")
"""Before this version the cached sums have another key, which would leave the service out."""


class RemoteReferenceDPOMixin:
    """For a trainer with DPOTrainer's methods (TRL 1.16): `class Mine(RemoteReferenceDPOMixin, TheTrainer)`.

    Sets `precompute_ref_log_probs`: the service is asked while the trainer is built, once for each batch of
    `precompute_ref_batch_size` pairs (a large one costs this process nothing), and by `evaluate` for a new dataset. The
    sums are cached with the dataset, under the service's fingerprint and precision. `reference` and
    `reference_timeout` are as in RemoteReferenceMixin; the timeout holds for a batch.
    """

    ref_model: Any
    _precompute_model_hash: Any
    ld_alpha: float | None

    def __init__(
        self,
        model: Any,
        ref_model: None = None,
        args: Any = None,
        *positional: Any,
        reference: Service,
        reference_timeout: float | None = None,
        **named: Any,
    ) -> None:
        refuse(ref_model, args)
        self._remote = RemoteReference(
            reference, timeout_within(reference_timeout, args.ddp_timeout), rank=args.process_index
        )
        args.precompute_ref_log_probs = True
        parent: Any = super()
        parent.__init__(model, None, args, *positional, **named)
        trainer: Any = self
        trainer.add_callback(self._remote.callback())

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        self.ref_model = self._remote  # so that TRL does not prepare the policy to stand in for it
        self._precompute_model_hash = self._cache_key()
        parent: Any = super()
        return parent._precompute_ref_logps(dataset, name, batch_size)

    def _cache_key(self) -> str:
        """All that the sums depend on besides the dataset. TRL's own key is a hash of the policy."""
        remote, trainer = self._remote, self
        late = f"the service did not say within {remote.timeout:g} s what it serves"

        def key() -> str:
            model = within(remote.timeout, in_thread(remote.client.info), late)["model"]
            remote.identity.check(model)
            args: Any = trainer.args  # type: ignore[attr-defined]
            options = (args.max_length, args.truncation_mode, trainer.ld_alpha)
            return repr(("logprobd", *(model[name] for name in COMPARED), *options))

        return on_all_ranks(key)

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The sums (pairs,) of the chosen and of the rejected completions' logprobs."""
        prompts, completions = split_rows(inputs["input_ids"], inputs["attention_mask"], inputs["completion_mask"])
        sums = on_all_ranks(lambda: self._sums(prompts, completions))
        return torch.tensor(sums, dtype=torch.float32, device=inputs["input_ids"].device).chunk(2)

    def _sums(self, prompts: Rows, completions: Rows) -> list[float]:
        """With `ld_alpha`, what a completion is longer than the other of its pair by counts for that much only."""
        if self.ld_alpha is None:
            return self._remote.wait_for(self._remote.ask(prompts, completions, reduce="sum"))
        logprobs = self._remote.wait_for(self._remote.ask(prompts, completions))
        lengths = [len(completion) for completion in completions]
        pairs = len(lengths) // 2
        shared = [min(pair) for pair in zip(lengths[:pairs], lengths[pairs:], strict=True)] * 2
        return [
            float(scores[:both].sum() + self.ld_alpha * scores[both:].sum())
            for scores, both in zip(logprobs, shared, strict=True)
        ]


class RemoteReferenceDPOTrainer(RemoteReferenceDPOMixin, DPOTrainer):
    """TRL's DPOTrainer, whose reference is a logprobd service."""


def refuse(ref_model: object, args: Any) -> None:
    """What cannot be done with a reference that is elsewhere."""
    if Version(trl.__version__) < OLDEST:
        raise ValueError(f"DPO with a remote reference needs TRL {OLDEST} or newer; this is {trl.__version__}")
    if ref_model is not None:
        raise ValueError("a remote reference takes the place of ref_model: leave ref_model out")
    if args is None:
        raise ValueError("a remote reference needs args (a DPOConfig)")
    if args.sync_ref_model:
        raise ValueError(
            "sync_ref_model moves a reference in this process towards the policy; a remote one stays what the service "
            "serves: set sync_ref_model=False"
        )
    if args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
        raise ValueError(
            "under FSDP, DPOTrainer loads a reference model even for precomputed logprobs: use DDP or DeepSpeed"
        )


def split_rows(ids: torch.Tensor, attention_mask: torch.Tensor, completion_mask: torch.Tensor) -> tuple[Rows, Rows]:
    """Padded rows (rows, columns) as prompts and completions. The first token of all predicts only: TRL scores none."""
    prompts, completions = [], []
    for row, kept, scored in zip(ids.cpu(), attention_mask.cpu().bool(), completion_mask.cpu().bool(), strict=True):
        tokens = row[kept].tolist()
        prompt_length = max(1, len(tokens) - int(scored[kept].sum()))
        prompts.append(tokens[:prompt_length])
        completions.append(tokens[prompt_length:])
    return prompts, completions
