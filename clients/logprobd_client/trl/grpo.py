"""GRPO and RLOO with a remote reference: no second model, the same losses.

The trainer is built with beta at 0, so that TRL loads no reference and copies no adapter; then it gets its beta back
and a RemoteReference as `ref_model`. From there on TRL's own code asks for the reference's logprobs where it always
does, and gets the service's. The call is sent as soon as the token ids exist and overlaps what TRL does meanwhile.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import trl
from packaging.version import Version
from trl import GRPOTrainer, RLOOTrainer

from logprobd_client.trl.reference import Call, RemoteReference, Rows, Service, timeout_within
from logprobd_client.trl.waiting import on_all_ranks

logger = logging.getLogger(__name__)

RETURNS_AUX_LOSS = Version("1.7")
"""Since this version a third value, the auxiliary loss, follows the logprobs and entropies."""

NO_IMAGES = (
    "a remote reference scores token ids, and this batch has images ({}): train with a local reference model, or "
    "without images"
)


class RemoteReferenceMixin:
    """For a trainer with GRPOTrainer's methods: `class Mine(RemoteReferenceMixin, TheTrainer)`.

    `reference` is a URL, several URLs of services of the same model, or a Client. `reference_timeout` (seconds, under
    `ddp_timeout`; the lesser of 600 and a third of it if not given) bounds the wait for one generation batch.
    """

    ref_model: Any
    temperature: float

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *positional: Any,
        reference: Service,
        reference_timeout: float | None = None,
        **named: Any,
    ) -> None:
        refuse(args)
        for name in ("train_dataset", "eval_dataset"):
            refuse_image_columns(name, named.get(name))
        remote = RemoteReference(
            reference, timeout_within(reference_timeout, args.ddp_timeout), rank=args.process_index
        )
        if getattr(model, "peft_config", None):
            logger.warning(
                "the policy comes with an adapter: the reference is what the service serves, so serve the base model "
                "with this adapter merged into it, unless the adapter is new"
            )
        parent: Any = super()
        beta, args.beta = args.beta, 0.0
        try:
            parent.__init__(model, reward_funcs, args, *positional, **named)
        finally:
            args.beta = beta
        self.beta = beta
        self.ref_model = remote  # only now: while it is built, TRL would take it for a module
        self._call: Call | None = None
        trainer: Any = self
        trainer.add_callback(remote.callback())

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]], *positional: Any, **named: Any) -> Any:
        for example in inputs:
            for column in ("image", "images"):
                given = example.get(column)
                if given is not None and not (isinstance(given, list) and not given):
                    raise ValueError(NO_IMAGES.format(f"column {column!r}"))
        parent: Any = super()
        return parent._generate_and_score_completions(inputs, *positional, **named)

    def _generate(self, *positional: Any, **named: Any) -> Any:
        parent: Any = super()
        generated = parent._generate(*positional, **named)
        self._call = self.ref_model.ask(plain(generated[0]), plain(generated[1]), self.temperature)
        return generated

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *positional: Any,
        **named: Any,
    ) -> Any:
        if not isinstance(model, RemoteReference):
            parent: Any = super()
            return parent._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *positional, **named
            )
        refuse_images(named)
        mask = attention_mask[:, -logits_to_keep:]
        rows = on_all_ranks(lambda: self._reference_logprobs(model, input_ids, attention_mask, logits_to_keep))
        logprobs = torch.zeros(mask.shape, dtype=torch.float32)
        for row, scores in zip(logprobs, rows, strict=True):
            row[: len(scores)] = torch.from_numpy(scores)
        logprobs = logprobs.to(input_ids.device).masked_fill(mask == 0, 0.0)
        return (logprobs, None, None) if Version(trl.__version__) >= RETURNS_AUX_LOSS else (logprobs, None)

    def _reference_logprobs(
        self, reference: RemoteReference, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> list[Any]:
        """The answer to the call under way; or, if that was for other tokens than these, to a call for these."""
        prompts = unpadded(input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep])
        completions = unpadded(input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:])
        call, self._call = self._call, None
        if call is None or not covers(call, prompts, completions):
            call = reference.ask(prompts, completions, self.temperature)
        return reference.wait_for(call)


class RemoteReferenceGRPOTrainer(RemoteReferenceMixin, GRPOTrainer):
    """TRL's GRPOTrainer, whose reference is a logprobd service.

    trainer = RemoteReferenceGRPOTrainer(model, reward, args, train_dataset=data, reference="http://127.0.0.1:8000")
    """


class RemoteReferenceRLOOTrainer(RemoteReferenceMixin, RLOOTrainer):
    """TRL's RLOOTrainer, whose reference is a logprobd service."""


def refuse(args: Any) -> None:
    """What cannot be done with a reference that is elsewhere, or needs none."""
    if args is None:
        raise ValueError("a remote reference needs args (a GRPOConfig or RLOOConfig) with beta over 0")
    if args.beta == 0.0:
        raise ValueError("beta is 0, so no reference is ever asked: set beta, or use TRL's own trainer")
    if args.sync_ref_model:
        raise ValueError(
            "sync_ref_model moves a reference in this process towards the policy; a remote one stays what the service "
            "serves: set sync_ref_model=False"
        )


def refuse_image_columns(name: str, dataset: Any) -> None:
    """Before anything is loaded, where a dataset says which columns it has."""
    datasets: Iterable[Any] = dataset.values() if isinstance(dataset, Mapping) else [dataset]
    for each in datasets:
        if found := {"image", "images"} & set(getattr(each, "column_names", None) or ()):
            raise ValueError(NO_IMAGES.format(f"column {min(found)!r} of {name}"))


def refuse_images(inputs: Mapping[str, Any]) -> None:
    """Whatever else the model would be given besides ids (pixels, grids, token types) cannot be sent."""
    given = sorted(name for name, value in inputs.items() if isinstance(value, torch.Tensor))
    if given or inputs.get("num_images"):
        raise ValueError(NO_IMAGES.format(", ".join(given or ["num_images"])))


def covers(call: Call, prompts: Rows, completions: Rows) -> bool:
    """Whether a call is for these rows; one whose completion is masked out altogether may have any."""
    return (
        call.prompts == prompts
        and len(call.completions) == len(completions)
        and all(not wanted or wanted == asked for asked, wanted in zip(call.completions, completions, strict=True))
    )


def unpadded(ids: torch.Tensor, mask: torch.Tensor) -> Rows:
    """The ids (rows, columns) that the mask leaves."""
    return [row[kept].tolist() for row, kept in zip(ids.cpu(), mask.cpu().bool(), strict=True)]


def plain(rows: Iterable[Any]) -> Rows:
    """Rows of ids as lists of ints; some generation backends and versions give tensors."""
    return [row.tolist() if isinstance(row, torch.Tensor) else list(row) for row in rows]
