"""What a remote reference notices, spreads and refuses beyond a run that goes well; DPO's cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
from trl import DPOConfig

import trl_runs
from logprobd_client import Client, Result
from logprobd_client.trl import ReferenceChangedError, RemoteReferenceDPOTrainer
from logprobd_client.trl.dpo import split_rows
from logprobd_client.trl.reference import RemoteReference
from running import Running

NOWHERE = "http://127.0.0.1:1"

# A trainer is a cycle of objects, which closes its client's connections whenever Python happens to collect it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Watched(Client):
    """Counts its calls, and can say that the service serves another model than it does."""

    def __init__(self, url: str, fingerprint: str | None = None) -> None:
        super().__init__(url)
        self.num_calls = 0
        self.fingerprint = fingerprint

    def score(self, *arguments: Any, **options: Any) -> Result:
        self.num_calls += 1
        result = super().score(*arguments, **options)
        return replace(result, model=self._said(result.model))

    def info(self) -> dict[str, Any]:
        info = super().info()
        return info | {"model": self._said(info["model"])}

    def _said(self, model: dict[str, Any]) -> dict[str, Any]:
        return model if self.fingerprint is None else model | {"fingerprint": self.fingerprint}


def test_completions_that_are_cut_off_count_for_nothing(
    policy_folder: Path, policy_service: Running, tmp_path: Path
) -> None:
    changes = {"mask_truncated_completions": True, "max_completion_length": 160, "max_steps": 5}
    stock = trl_runs.run(lambda: trl_runs.grpo(policy_folder, tmp_path, changes=changes))
    remote = trl_runs.run(lambda: trl_runs.grpo(policy_folder, tmp_path, policy_service.url, changes))

    assert any(0 < ratio < 1 for ratio in stock.logged("completions/clipped_ratio"))
    trl_runs.assert_same(remote, stock)


def test_a_reply_from_another_model_is_noticed(policy_service: Running) -> None:
    with Watched(policy_service.url) as client:
        reference = RemoteReference(client, timeout=60)
        reference.wait_for(reference.ask([[3]], [[4]]))
        client.fingerprint = "0123456789abcdef"

        with pytest.raises(ReferenceChangedError, match="fingerprint is not the same since this run began"):
            reference.wait_for(reference.ask([[3]], [[4]]))


def test_of_several_services_one_that_is_gone_does_not_matter(policy_service: Running) -> None:
    for rank in (0, 1):
        reference = RemoteReference([NOWHERE, policy_service.url], timeout=60, rank=rank)
        rows = reference.wait_for(reference.ask([[3], [5, 6]], [[4, 7], [8]]))

        assert [len(row) for row in rows] == [2, 1]


def test_a_policy_that_comes_with_an_adapter_is_warned_of(
    policy_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the service serves may lack the adapter, and nothing else would tell."""
    base = LlamaForCausalLM.from_pretrained(policy_folder)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    trl_runs.grpo(policy_folder, tmp_path, NOWHERE, model=model)

    assert "adapter merged into it" in caplog.text
    assert set(model.peft_config) == {"default"}, "no adapter was copied to be the reference"


def test_dpo_takes_sums_from_its_cache_only_if_they_are_this_references(
    policy_folder: Path, policy_service: Running, tmp_path: Path
) -> None:
    with Watched(policy_service.url) as client, Watched(policy_service.url, "0123456789abcdef") as other:
        trainer = trl_runs.dpo(policy_folder, tmp_path, client)
        another = trl_runs.dpo(policy_folder, tmp_path, other)
        dataset = trainer.train_dataset.remove_columns(["ref_chosen_logps", "ref_rejected_logps"])

        def calls_for(asking: Any, counted: Watched) -> int:
            before = counted.num_calls
            asking._precompute_ref_logps(dataset, "train", 4)
            return counted.num_calls - before

        assert calls_for(trainer, client) == 2
        assert calls_for(trainer, client) == 0
        assert calls_for(another, other) == 2
        trainer.ld_alpha = 0.5
        assert calls_for(trainer, client) == 2


def test_dpo_evaluates_new_data_after_training(policy_folder: Path, policy_service: Running, tmp_path: Path) -> None:
    """TRL refuses that without a reference model; a service is still there."""
    trainer = trl_runs.dpo(policy_folder, tmp_path, policy_service.url, {"max_steps": 1})
    trainer.train()

    assert np.isfinite(trainer.evaluate(trl_runs.preferences(4))["eval_loss"])


def test_dpo_refuses_what_needs_a_model_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sentence: str, **named: Any) -> None:
        with pytest.raises(ValueError, match=sentence):
            RemoteReferenceDPOTrainer("nothing", args=arguments, reference=NOWHERE, **named)

    arguments = DPOConfig(str(tmp_path), **trl_runs.COMMON)
    refused("leave ref_model out", ref_model=object())
    arguments.sync_ref_model = True
    refused("set sync_ref_model=False")
    arguments.sync_ref_model = False
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused("under FSDP")
    monkeypatch.setattr(trl, "__version__", "1.9.0")
    refused("needs TRL 1.16 or newer; this is 1.9.0")


def test_rows_are_split_where_the_completion_begins() -> None:
    """Also a row whose prompt was cut off: its first token predicts only."""
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8], [5, 6, 0, 0]])
    attention_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]])
    completion_mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])

    assert split_rows(ids, attention_mask, completion_mask) == ([[5], [5], [5, 6]], [[6, 7], [6, 7, 8], []])
