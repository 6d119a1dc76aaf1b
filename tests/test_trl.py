"""TRL's own trainers beside ours with a running service: the same losses, and one model less."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerControl, TrainerState, TrainingArguments

import trl_runs
from logprobd_client import Client
from logprobd_client.trl import (
    ReferenceChangedError,
    ReferenceFailedError,
    ReferenceIdentityCallback,
    RemoteReferenceDPOTrainer,
    RemoteReferenceGRPOTrainer,
)
from logprobd_client.trl.reference import RemoteReference, timeout_within
from oracle import own_logprobs
from running import Running, free_port

# A trainer is a cycle of objects, which closes its client's connections whenever Python happens to collect it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def folder(policy_folder: Path) -> Path:
    return policy_folder


@pytest.fixture(scope="module")
def service(policy_service: Running) -> Running:
    return policy_service


@pytest.fixture(scope="module")
def stock_grpo(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> trl_runs.Run:
    """TRL's own run, which the remote ones are held to."""
    return trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path_factory.mktemp("stock")))


class Counting(httpx.HTTPTransport):
    """Counts the calls that pass, and can hold them until an event."""

    def __init__(self, held: threading.Event | None = None) -> None:
        super().__init__()
        self.bodies: list[dict[str, Any]] = []
        self.held = held

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/logprobs":
            self.bodies.append(json.loads(request.read()))
            if self.held is not None:
                self.held.wait()
        return super().handle_request(request)


def test_grpo_has_the_same_losses_with_one_model_less(
    folder: Path, service: Running, stock_grpo: trl_runs.Run, tmp_path: Path
) -> None:
    remote = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, service.url))

    trl_runs.assert_same(remote, stock_grpo)
    assert (remote.num_models, stock_grpo.num_models) == (1, 2)


def test_rloo_has_the_same_losses_with_one_model_less(folder: Path, service: Running, tmp_path: Path) -> None:
    stock = trl_runs.run(lambda: trl_runs.rloo(folder, tmp_path))
    remote = trl_runs.run(lambda: trl_runs.rloo(folder, tmp_path, service.url))

    trl_runs.assert_same(remote, stock)
    assert (remote.num_models, stock.num_models) == (1, 2)


def test_a_new_adapter_has_the_same_losses(folder: Path, service: Running, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    stock = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, peft_config=adapter))
    remote = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, service.url, peft_config=adapter))

    trl_runs.assert_same(remote, stock)


def test_batches_that_are_used_twice_are_asked_for_once(folder: Path, service: Running, tmp_path: Path) -> None:
    changes = {"num_iterations": 2, "max_steps": 4}
    transport = Counting()
    stock = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, changes=changes))
    with Client(service.url, transport=transport, binary=False) as client:
        remote = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, client, changes))

    trl_runs.assert_same(remote, stock)
    assert len(transport.bodies) == 2
    assert {body["temperature"] for body in transport.bodies} == {trl_runs.ONLINE["temperature"]}


def test_evaluation_asks_too(folder: Path, service: Running, tmp_path: Path) -> None:
    data = trl_runs.prompts(8)
    stock = trl_runs.grpo(folder, tmp_path, eval_dataset=data).evaluate()
    remote = trl_runs.grpo(folder, tmp_path, service.url, eval_dataset=data).evaluate()

    assert remote["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-5)
    assert remote["eval_kl"] == pytest.approx(stock["eval_kl"], abs=1e-4)


def test_the_call_is_sent_before_the_logprobs_are_asked_for(folder: Path, service: Running, tmp_path: Path) -> None:
    """The answer is held until the trainer has sent a call and gone on."""
    held = threading.Event()
    transport = Counting(held)
    with Client(service.url, transport=transport, binary=False) as client:
        trainer = trl_runs.grpo(folder, tmp_path, client)
        trainer._generate(trl_runs.prompts(2)["prompt"][:])
        deadline = time.monotonic() + 60
        while not transport.bodies and time.monotonic() < deadline:
            time.sleep(0.01)
        sent = len(transport.bodies)
        held.set()

    assert sent == 1


def test_masked_positions_are_zero_and_the_others_the_models_own(
    folder: Path, service: Running, tmp_path: Path
) -> None:
    """Left-padded prompts, right-padded completions, and a completion that is masked out altogether."""
    trainer = trl_runs.grpo(folder, tmp_path, service.url)
    ids = torch.tensor([[0, 5, 6, 7, 8, 9], [3, 4, 5, 9, 0, 0], [3, 4, 5, 7, 7, 7]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]])
    logprobs, entropies, aux_loss = trainer._get_per_token_logps_and_entropies(trainer.ref_model, ids, mask, 3)

    model = trainer.model
    first = own_logprobs(model, np.array([5, 6]), np.array([7, 8, 9]), trl_runs.ONLINE["temperature"])
    second = own_logprobs(model, np.array([3, 4, 5]), np.array([9]), trl_runs.ONLINE["temperature"])
    np.testing.assert_allclose(logprobs[0], first, atol=1e-4)
    np.testing.assert_allclose(logprobs[1], [second[0], 0, 0], atol=1e-4)
    assert logprobs[2].tolist() == [0, 0, 0]
    assert logprobs.dtype == torch.float32
    assert entropies is aux_loss is None


@pytest.mark.parametrize(("version", "length"), [("1.6.0", 2), ("1.7.0", 3), ("2.0.0.dev0", 3)])
def test_as_many_values_are_returned_as_this_version_of_trl_expects(
    version: str, length: int, folder: Path, service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trl_runs.grpo(folder, tmp_path, service.url)
    monkeypatch.setattr(trl, "__version__", version)
    ids = torch.tensor([[3, 4]])
    returned = trainer._get_per_token_logps_and_entropies(trainer.ref_model, ids, torch.ones_like(ids), 1)

    assert len(returned) == length


@pytest.mark.parametrize(
    ("changes", "named", "sentence"),
    [
        ({"beta": 0.0}, {}, "beta is 0"),
        ({"sync_ref_model": True}, {}, "set sync_ref_model=False"),
        ({"ddp_timeout": 30}, {"reference_timeout": 30.0}, r"under ddp_timeout \(30 s\)"),
        ({}, {"train_dataset": Dataset.from_dict({"prompt": ["w1"], "image": [None]})}, "'image' of train_dataset"),
        (
            {},
            {"eval_dataset": {"a": Dataset.from_dict({"prompt": ["w1"], "images": [[]]})}},
            "'images' of eval_dataset",
        ),
    ],
)
def test_what_cannot_be_done_remotely_is_refused_in_a_sentence(
    changes: dict[str, Any], named: dict[str, Any], sentence: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        trl_runs.grpo(folder, tmp_path, "http://127.0.0.1:1", changes, **named)


def test_images_that_appear_later_are_refused(folder: Path, service: Running, tmp_path: Path) -> None:
    trainer = trl_runs.grpo(folder, tmp_path, service.url)
    ids = torch.tensor([[3, 4]])

    with pytest.raises(ValueError, match=r"has images \(column 'images'\)"):
        trainer._generate_and_score_completions([{"prompt": "w1", "images": ["an image"]}])
    with pytest.raises(ValueError, match=r"has images \(pixel_values\)"):
        trainer._get_per_token_logps_and_entropies(
            trainer.ref_model, ids, torch.ones_like(ids), 1, pixel_values=torch.zeros(1), num_images=[1]
        )


def test_a_trainer_without_args_is_refused() -> None:
    with pytest.raises(ValueError, match="needs args"):
        RemoteReferenceGRPOTrainer("nothing", reference="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="needs args"):
        RemoteReferenceDPOTrainer("nothing", reference="http://127.0.0.1:1")


def test_the_wait_ends_before_ddp_gives_up() -> None:
    assert timeout_within(None, 1800) == 600
    assert timeout_within(None, 90) == 30
    assert timeout_within(20, 90) == 20
    with pytest.raises(ValueError, match="reference_timeout is 0 s"):
        timeout_within(0, 90)


def test_a_service_that_is_gone_is_named(folder: Path, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    trainer = trl_runs.grpo(folder, tmp_path, url, reference_timeout=2)

    with pytest.raises(ReferenceFailedError, match=f"rank 0: .*{url}"):
        trainer.train()


def test_a_service_that_hangs_is_given_up(service: Running) -> None:
    held = threading.Event()
    with Client(service.url, transport=Counting(held), binary=False) as client:
        reference = RemoteReference(client, timeout=0.2)
        call = reference.ask([[3]], [[4]])

        with pytest.raises(TimeoutError, match=r"no scores of 1 sequences within reference_timeout \(0.2 s\)"):
            reference.wait_for(call)
        held.set()
        call.answer.result(60)


def test_a_reference_that_changes_in_the_run_is_noticed(folder: Path, service: Running, tmp_path: Path) -> None:
    trainer = trl_runs.grpo(folder, tmp_path, service.url)
    trainer.ref_model.identity.check({"id": "another", "fingerprint": "0123456789abcdef", "precision": "float32"})

    with pytest.raises(ReferenceFailedError, match="fingerprint is not the same since this run began") as raised:
        trainer.train()
    assert isinstance(raised.value.__cause__, ReferenceChangedError)


def test_a_resumed_run_is_held_to_the_reference_of_its_checkpoint(
    folder: Path, service: Running, stock_grpo: trl_runs.Run, tmp_path: Path
) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, service.url, changes))
    checkpoint = tmp_path / "checkpoint-2"
    resumed = trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, service.url), str(checkpoint))
    state = checkpoint / "trainer_state.json"
    fingerprint = service.get("/info").json()["model"]["fingerprint"]
    state.write_text(state.read_text().replace(fingerprint, "0123456789abcdef"))

    assert len(resumed.steps) == len(stock_grpo.steps)
    with pytest.raises(ReferenceFailedError, match="not the same as in the checkpoint that is resumed"):
        trl_runs.run(lambda: trl_runs.grpo(folder, tmp_path, service.url), str(checkpoint))


def test_the_callback_alone_holds_any_trainer_to_what_is_expected(service: Running) -> None:
    with Client(service.url) as client:
        model = client.info()["model"]
        right = ReferenceIdentityCallback(client, expect={"fingerprint": model["fingerprint"]})
        wrong = ReferenceIdentityCallback(client, expect={"precision": "bfloat16"})
        state, control, arguments = TrainerState(), TrainerControl(), TrainingArguments(use_cpu=True)

        right.on_train_begin(arguments, state, control)
        with pytest.raises(ReferenceFailedError, match="precision is not the same"):
            wrong.on_train_begin(arguments, state, control)
