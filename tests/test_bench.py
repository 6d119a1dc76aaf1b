"""The methods that benchmarks compare give the same numbers, so that only time and memory differ."""

import numpy as np
import pytest
import torch

from bench.seed import CHUNKS, FROM_LOGITS, inputs, ours, work_of
from bench.stock import METHODS, one_by_one
from bench.trainer import LEAST, score_in_batches
from bench.workloads import SHAPES, scored_tokens, sequences_of
from logprobd.engine.scorer import Scorer
from logprobd.sequences import Scores, Sequence
from oracle import loaded, sequence_of, tiny_llama

VOCAB = 211


def a_few() -> list[Sequence]:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, length).tolist() for length in (9, 14, 5)]
    lengths = [(0, 7), (0, 3), (0, 12), (1, 1), (1, 6), (2, 20)]
    return [sequence_of(prompts[prompt], random.integers(0, VOCAB, length).tolist()) for prompt, length in lengths]


@pytest.mark.parametrize("name", [name for name in METHODS if name != LEAST])
@torch.inference_mode()
def test_every_stock_method_scores_like_one_by_one(name: str) -> None:
    model = tiny_llama(VOCAB)
    truth = one_by_one(model, a_few())

    for got, expected in zip(METHODS[name](model, a_few()), truth, strict=True):
        assert np.abs(got - expected).max() < 1e-4


@torch.inference_mode()
def test_the_least_work_has_the_right_numbers_for_each_distinct_row() -> None:
    model = tiny_llama(VOCAB)

    for got, expected in zip(METHODS[LEAST](model, a_few()), one_by_one(model, a_few()), strict=True):
        assert len(got) in (len(expected), len(expected) - 1)  # a first row may be another's as well
        assert np.abs(got - expected[len(expected) - len(got) :]).max(initial=0) < 1e-4


def test_scoring_in_batches_answers_all_in_order() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "shared")
    scorer.budget.allow(30)
    outcomes = score_in_batches(scorer, a_few())

    assert [len(o.logprobs) for o in outcomes if isinstance(o, Scores)] == [7, 3, 12, 1, 6, 20]


@pytest.mark.parametrize("name", [*FROM_LOGITS, *map(ours, CHUNKS)])
@torch.inference_mode()
def test_every_way_of_the_seed_gives_the_same_logprobs(name: str) -> None:
    hidden, weight, ids = inputs((2, 20, 300, "cpu"))
    truth = (hidden @ weight.T).double().log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    assert float((work_of(name, hidden, weight, ids)() - truth).abs().max()) < 1e-5


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_what_it_says(name: str) -> None:
    shape, sequences = SHAPES[name], sequences_of(name, VOCAB)

    assert len(sequences) == shape.prompts * shape.group
    assert all(shape.prompt_tokens[0] <= len(s.prompt) <= shape.prompt_tokens[1] for s in sequences)
    assert all(shape.completion_tokens[0] <= len(s.completion) <= shape.completion_tokens[1] for s in sequences)
    assert scored_tokens(sequences) == sum(len(s.completion) for s in sequences)
