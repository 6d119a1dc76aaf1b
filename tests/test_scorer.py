"""The scorer in both layouts against a model's own forward, one sequence at a time."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from logprobd.engine.attention import Backend
from logprobd.engine.budget import BATCHES_BEFORE_GROWING
from logprobd.engine.layouts import PaddedLayout
from logprobd.engine.scorer import Scorer
from logprobd.messages import Layout
from logprobd.sequences import Candidates, Failure, Options, Outcome, Scores, Sequence
from oracle import entropies, ids_of, loaded, own_distribution, sequence_of, tiny_llama, tiny_longrope_phi3

VOCAB = 211
TOLERANCE = 1e-4
LAYOUTS: tuple[Layout, ...] = ("shared", "padded")

ScorerOf = Callable[..., Scorer]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


@pytest.fixture
def scorer(layout: Layout) -> Scorer:
    return Scorer(loaded(tiny_llama(VOCAB)), layout)


def random_ids(length: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return ids


def a_group() -> list[Sequence]:
    prompt = random_ids(17, 1)
    return [sequence_of(prompt, random_ids(length, 10 + length)) for length in (5, 1, 12, 3)]


def a_deep_tree() -> list[Sequence]:
    """Completions and prompts that share beginnings, repeat, and are prefixes of one another."""
    prompt, other = random_ids(20, 2), random_ids(9, 3)
    stem = random_ids(15, 4)
    return [
        sequence_of(prompt, stem),
        sequence_of(prompt, stem),
        sequence_of(prompt, stem[:6]),
        sequence_of(prompt, stem[:6] + other),
        sequence_of(prompt, stem[:6] + other[:4] + stem),
        sequence_of(prompt[:8], other),
        sequence_of(prompt[:8], prompt[8:] + stem),
        sequence_of(prompt + stem[:6], other[:5]),
        sequence_of(prompt[:1], stem),
        sequence_of(prompt[:1], []),
        sequence_of(other, [7]),
        sequence_of(other, []),
        sequence_of([3], [4]),
        sequence_of([3], [4]),
    ]


def asking_for_everything(sequences: list[Sequence]) -> list[Sequence]:
    """The same sequences with options and candidates that differ from one to the next."""
    options = itertools.cycle(
        [
            Options(),
            Options(temperature=0.5, entropy=True),
            Options(top_logprobs=4),
            Options(temperature=2.0, top_logprobs=VOCAB, entropy=True),
            Options(top_logprobs=1, entropy=True),
        ]
    )
    return [
        Sequence(s.prompt, s.completion, chosen, candidates_of(len(s.completion), index) if index % 3 else None)
        for index, (s, chosen) in enumerate(zip(sequences, options, strict=False))
    ]


def candidates_of(num_tokens: int, seed: int) -> Candidates:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 4, num_tokens)
    return Candidates(ids_of(random.integers(0, VOCAB, lengths.sum()).tolist()), ids_of(lengths.tolist()))


def assert_as_own_forward(model: PreTrainedModel, sequence: Sequence, outcome: Outcome) -> None:
    assert isinstance(outcome, Scores), outcome
    asked, num_tokens = sequence.options, len(sequence.completion)
    rows = own_distribution(model, sequence.prompt, sequence.completion, asked.temperature)
    assert close(outcome.logprobs, rows[np.arange(num_tokens), sequence.completion])
    assert (outcome.entropy is not None) == asked.entropy
    if outcome.entropy is not None:
        assert close(outcome.entropy, entropies(rows))
    assert (outcome.top_ids is not None) == (outcome.top_logprobs is not None) == (asked.top_logprobs > 0)
    if outcome.top_ids is not None:
        assert outcome.top_ids.shape == (num_tokens, asked.top_logprobs)
        assert close(outcome.top_logprobs, np.take_along_axis(rows, outcome.top_ids.astype(np.int64), axis=1))
        assert close(outcome.top_logprobs, -np.sort(-rows, axis=1)[:, : asked.top_logprobs])
    assert (outcome.candidate_logprobs is not None) == (sequence.candidates is not None)
    if sequence.candidates is not None:
        owners = np.repeat(np.arange(num_tokens), sequence.candidates.lengths)
        assert close(outcome.candidate_logprobs, rows[owners, sequence.candidates.ids])


def close(got: Any, expected: np.ndarray[Any, Any]) -> bool:
    assert (got.dtype, got.shape) == (np.float32, expected.shape)
    return bool(np.abs(got - expected).max(initial=0) < TOLERANCE)


def computed(outcomes: list[Outcome]) -> int:
    return sum(outcome.computed_tokens for outcome in outcomes if isinstance(outcome, Scores))


def distinct_prefixes(sequences: list[Sequence]) -> int:
    """Of what goes through the model: prompts and completions without their last tokens."""
    inputs = [[*s.prompt.tolist(), *s.completion.tolist()[:-1]] for s in sequences if len(s.completion)]
    return len({tuple(ids[: end + 1]) for ids in inputs for end in range(len(ids))})


@pytest.mark.parametrize("make", [a_group, a_deep_tree])
def test_scores_are_those_of_the_models_own_forward(scorer: Scorer, make: Callable[[], list[Sequence]]) -> None:
    sequences = make()

    for sequence, outcome in zip(sequences, scorer.score(sequences), strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_all_options_may_be_mixed_in_a_batch(scorer: Scorer) -> None:
    sequences = asking_for_everything(a_deep_tree() + a_group())

    for sequence, outcome in zip(sequences, scorer.score(sequences), strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_the_tiny_model_is_worth_testing_with() -> None:
    rows = own_distribution(tiny_llama(VOCAB), ids_of(random_ids(5, 1)), ids_of(random_ids(40, 2)))

    assert 1 < rows.std() < 4


def test_only_distinct_prefixes_are_computed() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "shared")

    for sequences in (a_group(), a_deep_tree(), a_deep_tree() + a_group()):
        assert computed(scorer.score(sequences)) == distinct_prefixes(sequences)


def test_without_sharing_every_input_token_is_computed() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "padded")
    sequences = a_deep_tree()
    inputs = [s.num_tokens - 1 for s in sequences if len(s.completion)]

    assert computed(scorer.score(sequences)) == sum(inputs)


def test_identical_completions_cost_nothing() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "shared")
    outcomes = scorer.score([sequence_of([5, 6, 7], [8, 9])] * 3)
    costs = [outcome.computed_tokens for outcome in outcomes if isinstance(outcome, Scores)]

    assert sorted(costs) == [0, 0, 4]


def test_one_token_completions_of_one_prompt_cost_the_prompt() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "shared")
    sequences = [sequence_of(random_ids(30, 5), [token]) for token in range(VOCAB)]
    outcomes = scorer.score(sequences)
    total = sum(np.exp(outcome.logprobs[0]) for outcome in outcomes if isinstance(outcome, Scores))

    assert computed(outcomes) == 30
    assert total == pytest.approx(1, abs=1e-4)


def test_the_order_of_a_batch_does_not_matter(scorer: Scorer) -> None:
    sequences = asking_for_everything(a_deep_tree() + a_group())
    order = np.random.default_rng(0).permutation(len(sequences)).tolist()
    outcomes = scorer.score(sequences)
    shuffled = scorer.score([sequences[index] for index in order])

    assert computed(shuffled) == computed(outcomes)
    for index, outcome in zip(order, shuffled, strict=True):
        assert_as_own_forward(scorer.model, sequences[index], outcome)


def test_no_sequences_have_no_outcomes(scorer: Scorer) -> None:
    assert scorer.score([]) == []


def test_an_empty_completion_has_empty_answers(scorer: Scorer) -> None:
    options = Options(top_logprobs=3, entropy=True)
    sequence = sequence_of([1, 2], [], options, Candidates(ids_of([]), ids_of([])))
    (outcome,) = scorer.score([sequence])

    assert_as_own_forward(scorer.model, sequence, outcome)
    assert computed([outcome]) == 0


def test_a_longrope_model_scores_both_sides_of_its_boundary_in_one_call(layout: Layout) -> None:
    scorer = Scorer(loaded(tiny_longrope_phi3(VOCAB)), layout)
    ids = random_ids(200, 6)
    ends = [(10, 31), (10, 32), (10, 33), (10, 34), (31, 32), (32, 33), (33, 34), (10, 200), (150, 151), (1, 12)]
    sequences = [sequence_of(ids[:start], ids[start:end], Options(entropy=True)) for start, end in ends]

    for sequence, outcome in zip(sequences, scorer.score(sequences), strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)
        assert_as_own_forward(scorer.model, sequence, scorer.score([sequence])[0])


def test_the_boundary_of_longrope_is_worth_testing() -> None:
    model, ids = tiny_longrope_phi3(VOCAB), ids_of(random_ids(33, 6))
    short = own_distribution(model, ids[:10], ids[10:32])
    long = own_distribution(model, ids[:10], ids[10:33])[:-1]

    assert np.abs(short - long).max() > 0.1


@contextmanager
def memory_for(scorer: Scorer, num_tokens: int) -> Iterator[list[int]]:
    """The backbone is out of memory beyond so many tokens; gives the sizes that it was asked for."""
    sizes: list[int] = []

    def refuse(_module: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        sizes.append(kwargs["input_ids"].numel())
        if sizes[-1] > num_tokens:
            raise torch.OutOfMemoryError(f"{sizes[-1]} tokens")

    hook = scorer.head.backbone.register_forward_pre_hook(refuse, with_kwargs=True)
    try:
        yield sizes
    finally:
        hook.remove()


def test_a_batch_that_does_not_fit_is_halved(scorer: Scorer) -> None:
    sequences = a_deep_tree()
    with memory_for(scorer, 64) as sizes:
        outcomes = scorer.score(sequences)

    assert max(sizes) > 64
    assert sum(size <= 64 for size in sizes) > 1
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_a_sequence_that_does_not_fit_at_once_is_scored_in_windows(scorer: Scorer) -> None:
    allow_windows(scorer)
    sequences = a_group()
    sequences.insert(1, sequence_of(random_ids(300, 7), [1, 2, 3]))
    with memory_for(scorer, 64) as sizes:
        outcomes = scorer.score(sequences)

    assert sum(size <= 64 for size in sizes) > 6
    for sequence, outcome in zip(sequences, outcomes, strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_only_a_sequence_that_does_not_fit_in_any_way_fails() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "padded")
    sequences = a_group()
    sequences.insert(1, sequence_of(random_ids(300, 7), [1, 2, 3]))
    with memory_for(scorer, 64):
        outcomes = scorer.score(sequences)

    assert outcomes[1] == Failure("out_of_memory", "a sequence of 303 tokens does not fit in memory")
    for index in (0, 2, 3, 4):
        assert_as_own_forward(scorer.model, sequences[index], outcomes[index])


def test_what_fits_in_no_window_fails_alone_and_the_next_batch_is_served(layout: Layout) -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), layout)
    allow_windows(scorer)
    with memory_for(scorer, 15):
        outcomes = scorer.score(a_group())

    assert {outcome.code for outcome in outcomes if isinstance(outcome, Failure)} == {"out_of_memory"}
    for sequence, outcome in zip(a_group(), scorer.score(a_group()), strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_a_smaller_budget_is_learnt_and_a_larger_one_tried_again_later(layout: Layout) -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), layout)
    scorer.budget.allow(128)
    sequences = a_deep_tree()
    with memory_for(scorer, 64) as sizes:
        scorer.score(sequences)
        failures = sum(size > 64 for size in sizes)
        scorer.score(sequences)

        assert (sum(size > 64 for size in sizes), failures > 0) == (failures, True)
    assert scorer.budget.tokens < 128
    for _ in range(3 * BATCHES_BEFORE_GROWING):
        scorer.score(sequences[:1])
    assert scorer.budget.tokens == 128


def allow_windows(scorer: Scorer) -> None:
    """As the self-test does for a model whose own cache computes the same."""
    if isinstance(scorer.laying, PaddedLayout):
        scorer.laying.in_windows = True


@pytest.mark.parametrize("max_tokens", [16, 33, 100])
@pytest.mark.parametrize("make", [a_group, a_deep_tree])
def test_windows_give_the_scores_of_the_models_own_forward(
    scorer: Scorer, make: Callable[[], list[Sequence]], max_tokens: int
) -> None:
    allow_windows(scorer)
    scorer.budget.allow(max_tokens)
    sequences = asking_for_everything([*make(), sequence_of(random_ids(200, 8), random_ids(150, 9))])

    for sequence, outcome in zip(sequences, scorer.score(sequences), strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_windows_change_no_bit_of_a_shared_batch() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "shared")
    sequences = [*a_deep_tree(), sequence_of(random_ids(200, 8), random_ids(150, 9))]
    whole = scorer.score(sequences)
    scorer.budget.allow(48)

    for at_once, in_windows in zip(whole, scorer.score(sequences), strict=True):
        assert isinstance(at_once, Scores)
        assert isinstance(in_windows, Scores)
        assert at_once.logprobs.tolist() == in_windows.logprobs.tolist()


def test_windows_share_what_a_batch_shares() -> None:
    scorer = Scorer(loaded(tiny_llama(VOCAB)), "shared")
    scorer.budget.allow(32)
    sequences = a_deep_tree() + a_group()

    assert computed(scorer.score(sequences)) == distinct_prefixes(sequences)


def test_longrope_counts_the_whole_sequence_in_every_window() -> None:
    scorer = Scorer(loaded(tiny_longrope_phi3(VOCAB)), "shared")
    scorer.budget.allow(16)
    ids = random_ids(100, 6)
    sequences = [sequence_of(ids[:10], ids[10:end]) for end in (31, 34, 100)]

    for sequence, outcome in zip(sequences, scorer.score(sequences), strict=True):
        assert_as_own_forward(scorer.model, sequence, outcome)


def test_other_errors_of_the_model_are_raised(scorer: Scorer) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("of another kind")

    with scorer.head.backbone.register_forward_pre_hook(fail), pytest.raises(RuntimeError, match="of another kind"):
        scorer.score(a_group())


@pytest.mark.parametrize(("layout", "backend"), [("padded", None), ("shared", "nodes"), ("shared", "flex")])
def test_nan_fails_the_sequence_that_meets_it_and_no_other(layout: Layout, backend: Backend | None) -> None:
    torch._dynamo.reset()
    model = tiny_llama(VOCAB)
    model.model.embed_tokens.weight.data[VOCAB - 1] = float("nan")
    scorer = Scorer(loaded(model), layout, backend)
    prompt = [1, 2, 3, 4]
    sequences = [sequence_of(prompt, [5, 6, 7]), sequence_of(prompt, [5, VOCAB - 1, 8]), sequence_of([9, 8], [7, 6])]
    outcomes = scorer.score(sequences)

    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].code == "non_finite_logits"
    assert_as_own_forward(model, sequences[0], outcomes[0])
    assert_as_own_forward(model, sequences[2], outcomes[2])


def test_nan_does_not_reach_a_sequence_that_ends_before_it(layout: Layout) -> None:
    model = tiny_llama(VOCAB)
    model.model.embed_tokens.weight.data[VOCAB - 1] = float("nan")
    scorer = Scorer(loaded(model), layout)
    sequences = [sequence_of([1, 2, 3], [4, 5]), sequence_of([1, 2, 3], [4, 5, VOCAB - 1, 6])]
    outcomes = scorer.score(sequences)

    assert isinstance(outcomes[1], Failure)
    assert_as_own_forward(model, sequences[0], outcomes[0])
