"""The memory plan: what it measures, what it refuses, and that its limit holds whatever is sent."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from logprobd.engine.budget import PassBudget
from logprobd.engine.memory import Fit, largest, plan_memory, window_tokens
from logprobd.engine.meter import CpuMeter
from logprobd.engine.model import ModelRefusedError
from logprobd.engine.scorer import Scorer
from logprobd.engine.selftest import choose_scorer
from logprobd.sequences import Options, Scores, Sequence
from logprobd.settings import MemoryLimit
from oracle import ids_of, loaded, own_logprobs, sequence_of, tiny_llama, tiny_sizes
from running import running_service

MIB = 2**20
LARGE_VOCABULARY = 262_144


def planned(model: PreTrainedModel, limit: int | None = None) -> tuple[Scorer, Any]:
    """A scorer with its plan; the limit is in bytes beyond what is in use now."""
    meter = CpuMeter()
    scorer, _ = choose_scorer(loaded(model))
    bound = None if limit is None else MemoryLimit(meter.used() + limit)
    return scorer, plan_memory(scorer, meter, bound)


def wide_llama(**changes: Any) -> LlamaForCausalLM:
    """Few weights, and much to compute for each token."""
    return tiny_llama(4096, hidden_size=256, intermediate_size=4096, **changes)


def test_without_a_limit_most_of_what_is_free_is_planned_with() -> None:
    scorer, plan = planned(tiny_llama())

    assert plan.limit > 256 * MIB
    assert plan.max_pass_tokens == scorer.budget.tokens == 4096
    assert plan.longest_sequence == 512
    assert 0 < plan.per_token < MIB
    assert plan.per_cached_token >= 2 * 2 * 2 * 16 * 4  # layers, keys and values, key heads, their size, bytes


def test_a_smaller_limit_allows_smaller_passes_and_still_the_same_scores() -> None:
    sequences = [sequence_of([token, *range(200)], [*range(100 + token)]) for token in range(8)]
    _, wide = planned(wide_llama())
    scorer, plan = planned(wide_llama(), wide.fixed + 400 * wide.per_token)
    outcomes = scorer.score(sequences)

    assert 100 < plan.max_pass_tokens < 4096
    assert plan.longest_sequence == 512
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert isinstance(outcome, Scores)
        own = own_logprobs(scorer.model, sequence.prompt, sequence.completion)
        assert np.abs(outcome.logprobs - own).max() < 1e-4


def test_the_longest_sequence_is_what_leaves_room_for_a_window() -> None:
    _, wide = planned(wide_llama())
    _, plan = planned(wide_llama(max_position_embeddings=1 << 20), wide.fixed + 200 * wide.per_token)

    assert 200 < plan.longest_sequence < 1 << 20


def test_a_limit_that_holds_no_window_is_refused_with_the_numbers() -> None:
    scorer, _ = choose_scorer(loaded(wide_llama()))

    with pytest.raises(ModelRefusedError, match=r"--memory-limit 1 MiB is too small: \d+ MiB are in use .* would do"):
        plan_memory(scorer, CpuMeter(), MemoryLimit(1))


def test_attention_over_every_pair_of_tokens_is_planned_for() -> None:
    config = BloomConfig(vocab_size=211, hidden_size=64, n_layer=2, n_head=16)
    scorer, plan = planned(BloomForCausalLM(config).eval())

    assert scorer.layout == "padded"
    assert plan.per_token > 0


def test_room_for_keys_is_taken_from_the_window() -> None:
    scorer, _ = planned(tiny_llama())
    fit = Fit(fixed=1e6, each=1e4)
    sizes = [window_tokens(scorer, fit, 2e7, longest) for longest in (100, 1000, 5000, 9000, 100_000)]

    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0] > 1000, sizes[-1]) == (True, 0)


def test_a_pass_is_whole_where_it_fits_and_else_a_window() -> None:
    budget = PassBudget()
    budget.allow(1000, lambda longest: 900 - longest)

    assert [budget.pass_tokens(total, 300) for total in (10, 1000, 1001)] == [10, 1000, 600]
    assert budget.pass_tokens(2000, 899) == 16


@pytest.mark.parametrize("answer", [0, 1, 7, 100])
def test_the_largest_that_fits(answer: int) -> None:
    assert largest(100, lambda number: number <= answer) == answer


def test_the_peak_is_what_was_taken_in_between() -> None:
    meter = CpuMeter()
    meter.reset_peak()
    before = meter.used()
    torch.ones(64 * MIB, dtype=torch.uint8)
    meter.release()

    assert 60 * MIB < meter.peak() - before < 80 * MIB
    assert meter.used() - before < 8 * MIB
    meter.reset_peak()
    assert meter.peak() - before < 16 * MIB


def test_where_the_kernels_mark_cannot_be_reset_the_peak_is_watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("logprobd.engine.meter.CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    meter = CpuMeter()
    meter.reset_peak()
    before = meter.used()
    for _ in range(20):
        torch.ones(64 * MIB, dtype=torch.uint8)

    assert 60 * MIB < meter.peak() - before < 80 * MIB


def test_nothing_grows_over_a_thousand_mixed_batches() -> None:
    scorer, _ = planned(tiny_llama())
    random = np.random.default_rng(0)

    def batch() -> list[Sequence]:
        options = Options(
            temperature=float(random.choice([1.0, 0.7])),
            top_logprobs=int(random.integers(0, 5)),
            entropy=bool(random.integers(2)),
        )
        prompts = [random.integers(0, 211, random.integers(1, 200)).astype(np.int32) for _ in range(2)]
        completions = random.integers(0, 211, (int(random.integers(1, 9)), int(random.integers(1, 60))))
        return [Sequence(prompts[index % 2], ids.astype(np.int32), options) for index, ids in enumerate(completions)]

    meter = CpuMeter()
    used = []
    for number in range(1000):
        scorer.score(batch())
        if number in (199, 999):
            meter.release()
            used.append(meter.used())

    assert used[1] - used[0] < 8 * MIB


def test_memory_is_back_at_its_idle_level_after_running_out() -> None:
    scorer, _ = planned(tiny_llama())
    sequences = [sequence_of([token, *range(60)], [*range(40)]) for token in range(8)]
    scorer.score(sequences)
    meter = CpuMeter()
    wasted: list[int] = []

    def run_out(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].numel() > 300:
            waste = torch.ones(128 * MIB, dtype=torch.uint8)
            wasted.append(waste.numel())
            torch.empty(1 << 60, dtype=torch.uint8)  # what the allocator says here is what is recognized

    with scorer.head.backbone.register_forward_pre_hook(run_out, with_kwargs=True):
        outcomes = scorer.score(sequences)

    assert wasted
    assert scorer.budget.halvings == len(wasted)
    assert meter.used() < 16 * MIB
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert isinstance(outcome, Scores)
        own = own_logprobs(scorer.model, sequence.prompt, sequence.completion)
        assert np.abs(outcome.logprobs - own).max() < 1e-4


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large-vocabulary")
    torch.manual_seed(0)
    sizes = {**tiny_sizes(), "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 400}
    LlamaForCausalLM(LlamaConfig(vocab_size=LARGE_VOCABULARY, **sizes)).save_pretrained(folder)
    return folder


def test_the_limit_holds_under_the_longest_requests_from_everybody(large_vocabulary: Path, tmp_path: Path) -> None:
    weights = sum(file.stat().st_size for file in large_vocabulary.glob("*.safetensors"))
    limit = weights + 300 * MIB
    random = np.random.default_rng(0)
    with running_service(
        tmp_path / "log", "--model", str(large_vocabulary), "--memory-limit", str(limit), "--max-queued-tokens", "20000"
    ) as running:
        longest = running.get("/info").json()["limits"]["max_sequence_tokens"]
        bodies = [
            {
                "prompt": random.integers(0, LARGE_VOCABULARY, longest - 8).tolist(),
                "completions": [random.integers(0, LARGE_VOCABULARY, 8).tolist()],
                "top_logprobs": 256,
                "entropy": True,
                "temperature": 0.7,
            }
            for _ in range(64)
        ]
        with ThreadPoolExecutor(64) as pool:
            statuses = [reply.status_code for reply in pool.map(running.post, bodies)]
        info = running.get("/info").json()

    assert longest == 400
    assert set(statuses) == {200, 429}
    assert statuses.count(200) > 40
    assert info["memory"]["limit"] == limit
    assert info["workers"][0]["memory"]["peak"] <= 1.05 * limit
    assert info["workers"][0]["out_of_memory_halvings"] == 0


def test_a_sequence_longer_than_what_fits_is_refused_with_the_longest_that_does(tmp_path: Path) -> None:
    folder = tmp_path / "long"
    tiny_llama(max_position_embeddings=1 << 20).save_pretrained(folder)
    with running_service(tmp_path / "log", "--model", str(folder), "--memory-limit", "200MiB") as running:
        longest = running.get("/info").json()["memory"]["longest_sequence"]
        reply = running.post({"prompt": [1] * longest, "completions": [[2]]})

    assert 1000 < longest < 1 << 20
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "sequence_too_long")
    assert str(longest) in reply.json()["error"]["message"]


def test_a_limit_too_small_for_the_model_ends_the_start(tiny_folder: Path, tmp_path: Path) -> None:
    with running_service(
        tmp_path / "log", "--model", str(tiny_folder), "--memory-limit", "1MiB", ready=False
    ) as running:
        code = running.process.wait(120)

    assert code == 1
    assert "--memory-limit 1 MiB is too small" in running.log


def test_long_sequences_of_the_embedded_model_are_exact_in_windows(embedded_model: Any) -> None:
    scorer, _ = choose_scorer(loaded(embedded_model))
    scorer.budget.allow(128)
    random = np.random.default_rng(0)
    ids = random.integers(0, 49152, 700).tolist()
    sequences = [Sequence(ids_of(ids[:600]), ids_of(ids[600:]), Options()), sequence_of(ids[:500], ids[:30])]
    outcomes = scorer.score(sequences)

    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert isinstance(outcome, Scores)
        own = own_logprobs(scorer.model, sequence.prompt, sequence.completion)
        assert np.abs(outcome.logprobs - own).max() < 3e-4
