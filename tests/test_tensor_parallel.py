"""A model spread over two processes: the numbers of one, and a group that lives and dies together."""

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from logprobd.engine.model import ModelRefusedError, Source, parts_of
from logprobd.engine.preparing import Prepared, prepare
from logprobd.engine.ranks import ALONE, Ranks
from logprobd.messages import Start
from logprobd.sequences import Candidates, Options, Scores, Sequence
from logprobd.settings import ModelSettings
from oracle import entropies, ids_of, own_distribution, tiny_llama, tiny_sizes
from pages import page, run
from running import Running, environment, run_cli, running_service

VOCAB = 211  # odd: the parts are of unequal size
NUM_TOP = 5


def sizes(**changes: Any) -> dict[str, Any]:
    return {**tiny_sizes(), "vocab_size": VOCAB, "initializer_range": 0.25, "head_dim": 16, **changes}


MODELS: dict[str, Any] = {
    "llama, tied": lambda: tiny_llama(VOCAB, tie_word_embeddings=True),
    "llama, untied": lambda: tiny_llama(VOCAB, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes(tie_word_embeddings=True))),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **sizes(pad_token_id=0, bos_token_id=1, eos_token_id=2),
            sliding_window=16,
            final_logit_softcapping=5.0,
            attn_logit_softcapping=20.0,
        )
    ),
    "qwen3 moe, untied": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes(tie_word_embeddings=False), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
        )
    ),
}


def some_sequences() -> list[Sequence]:
    """Completions that share a prompt, one that extends another, and one of a prompt of its own; with everything."""
    random = np.random.default_rng(3)
    prompt, other, short, long, one, more = (
        random.integers(0, VOCAB, length).astype(np.int32) for length in (40, 3, 9, 21, 1, 8)
    )
    pairs = [(prompt, short), (prompt, long), (prompt, one), (prompt, np.concatenate([short, more])), (other, long)]
    options = Options(temperature=0.7, top_logprobs=NUM_TOP, entropy=True, ranks=True)
    return [
        Sequence(own, asked, options, Candidates(asked[::-1], np.ones(len(asked), dtype=np.int32)))
        for own, asked in pairs
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(0)
    folders = {}
    for name, build in MODELS.items():
        folders[name] = tmp_path_factory.mktemp("model")
        build().eval().save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def asked(folders: dict[str, Path]) -> list[tuple[str, ModelSettings]]:
    half = ModelSettings(model=str(folders["llama, untied"]), precision="bfloat16", head_precision="float32")
    return [*((name, ModelSettings(model=str(folder))) for name, folder in folders.items()), ("half", half)]


@pytest.fixture(scope="module")
def parallel(asked: list[tuple[str, ModelSettings]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two processes make of every model together."""
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "asked").write_bytes(pickle.dumps([(settings, some_sequences()) for _, settings in asked]))
    meeting = os.memfd_create("meeting", 0)
    script = Path(__file__).with_name("parallel_engine.py")
    both = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(meeting), folder / "asked", folder / "out"],
            pass_fds=[meeting],
            env=environment(),
        )
        for rank in range(2)
    ]
    assert [process.wait(200) for process in both] == [0, 0]
    answers = pickle.loads((folder / "out").read_bytes())
    return {name: answer for (name, _), answer in zip(asked, answers, strict=True)}


@pytest.fixture(scope="module")
def single(asked: list[tuple[str, ModelSettings]]) -> dict[str, Prepared]:
    """Every model in this process alone."""
    return {
        name: prepare(Start(settings, settings.devices, None), lambda: ALONE, tell=lambda _step: None)
        for name, settings in asked
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["whole", "windows"])
def test_two_processes_give_the_numbers_of_the_models_own_forward(
    name: str, way: str, parallel: dict[str, Any], single: dict[str, Prepared]
) -> None:
    model = single[name].scorer.model

    for sequence, outcome in zip(some_sequences(), parallel[name][way], strict=True):
        assert_as_own_forward(model, sequence, outcome)


def assert_as_own_forward(model: PreTrainedModel, sequence: Sequence, outcome: Scores) -> None:
    rows = own_distribution(model, sequence.prompt, sequence.completion, sequence.options.temperature)
    places = np.arange(len(sequence.completion))
    chosen = rows[places, sequence.completion]
    assert sequence.candidates is not None
    assert outcome.top_ids is not None
    assert outcome.ranks is not None

    assert outcome.logprobs == pytest.approx(chosen, abs=1e-4)
    assert outcome.entropy == pytest.approx(entropies(rows), abs=1e-4)
    assert outcome.candidate_logprobs == pytest.approx(rows[places, sequence.candidates.ids], abs=1e-4)
    assert outcome.top_logprobs == pytest.approx(np.sort(rows)[:, ::-1][:, :NUM_TOP], abs=1e-4)
    assert outcome.top_logprobs == pytest.approx(rows[places[:, None], outcome.top_ids], abs=1e-4)
    assert outcome.ranks.tolist() == ((rows > chosen[:, None]).sum(axis=1) + 1).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_a_spread_model_is_the_same_model_with_half_of_everything_a_process(
    name: str, parallel: dict[str, Any], single: dict[str, Prepared]
) -> None:
    alone, answer = single[name], parallel[name]

    assert answer["info"] == alone.scorer.loaded.info
    assert answer["layout"] == alone.scorer.layout == "shared"
    assert answer["width"] == VOCAB // 2 + 1
    # Norms, and the routers of experts, are in both.
    assert 0.5 < answer["plan"].weights / alone.plan.weights < 0.55


def test_a_spread_head_computes_in_float32_where_it_is_asked_to(
    parallel: dict[str, Any], single: dict[str, Prepared]
) -> None:
    for ours, expected in zip(parallel["half"]["whole"], single["half"].scorer.score(some_sequences()), strict=True):
        assert isinstance(expected, Scores)
        assert np.abs(ours.logprobs - expected.logprobs).mean() < 0.1  # partial sums in bfloat16 round otherwise
    assert parallel["half"]["logits"] == "torch.float32"
    assert parallel["half"]["info"].precision == "bfloat16"


def body_of(number: int) -> dict[str, object]:
    return {"prompt": [1, 2, 3, number], "completions": [[7, 8, number], [number, 5]]}


def logprobs(service: Running, number: int) -> list[float]:
    response = service.post(body_of(number))
    assert response.status_code == 200, response.text
    return [value for scores in response.json()["groups"][0]["completions"] for value in scores["logprobs"]]


def expected_logprobs(model: PreTrainedModel, number: int) -> Any:
    """Of the same, as something to compare with."""
    chosen = [
        own_distribution(model, ids_of([1, 2, 3, number]), ids_of(completion))[np.arange(len(completion)), completion]
        for completion in ([7, 8, number], [number, 5])
    ]
    return pytest.approx(np.concatenate(chosen), abs=1e-4)


def test_a_group_answers_and_is_replaced_whole_when_one_of_it_dies(
    folders: dict[str, Path], single: dict[str, Prepared], tmp_path: Path
) -> None:
    folder = folders["llama, untied"]
    alone = single["llama, untied"].scorer.loaded
    expected = [expected_logprobs(alone.model, number) for number in range(40)]
    with running_service(tmp_path / "log", "--model", str(folder), "--devices", "cpu+cpu") as running:
        first = psutil.Process(running.worker_pids()[0])
        (second,) = first.children()
        workers = running.get("/info").json()["workers"]

        assert [worker["device"] for worker in workers] == ["cpu+cpu"]
        assert running.get("/info").json()["model"]["fingerprint"] == alone.info.fingerprint

        threading.Timer(0.2, second.send_signal, [signal.SIGKILL]).start()
        with ThreadPoolExecutor(8) as pool:
            for _ in range(3):
                answers = list(pool.map(lambda number: logprobs(running, number), range(40)))
                assert answers == expected
            running.wait_for("/readyz")

        assert not second.is_running()
        assert not first.is_running()
        assert running.get("/info").json()["workers"][0]["restarts"] == 1
        (successor,) = psutil.Process(running.worker_pids()[0]).children()

        psutil.Process(running.worker_pids()[0]).kill()

        assert not psutil.wait_procs([successor], timeout=20)[1], "the second process outlived the first"
        assert logprobs(running, 1) == expected[1]


def test_the_page_s_check_prints_what_the_page_says(tmp_path: Path) -> None:
    ((command, shown),) = re.findall(
        r"```sh\n(logprobd check .*?)\n```\n```\n(.*?)```", page("tensor-parallel"), re.DOTALL
    )
    printed = run(command, tmp_path).splitlines()

    assert all(any(line.startswith(said) for line in printed) for said in shown.splitlines())


def test_a_group_refuses_a_model_that_it_cannot_share_evenly(tmp_path: Path) -> None:
    tiny_llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48).save_pretrained(tmp_path)
    refused = run_cli("check", "--model", str(tmp_path), "--devices", "cpu+cpu")

    assert refused.returncode == 1
    assert "num_attention_heads 3, which 2 devices cannot share evenly" in refused.stderr


def test_a_family_without_a_plan_is_refused(tmp_path: Path) -> None:
    GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path)

    with pytest.raises(ModelRefusedError, match="no plan for spreading gpt2"):
        parts_of(Ranks(0, 2), Source(str(tmp_path), "gpt2"), {})
