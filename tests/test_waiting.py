"""The queue: what makes a batch, in what order, and that nothing is lost or taken twice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logprobd.messages import Layout
from logprobd.sequences import Options, Sequence
from logprobd.waiting import Entry, Job, Waiting


def job_of(*lengths: tuple[str, int]) -> Job:
    """A job from (prompt, completion length) pairs; a prompt is text whose characters are its ids."""
    prompts = {text: np.array([ord(c) for c in text], dtype=np.int32) for text, _ in lengths}
    return Job([Sequence(prompts[text], np.zeros(n, dtype=np.int32), Options()) for text, n in lengths])


def tokens_of(batch: list[Entry]) -> int:
    """What a batch computes: each distinct prompt once, and every completion."""
    prompts = {entry.sequence.prompt.tobytes() for entry in batch}
    return sum(len(prompt) // 4 for prompt in prompts) + sum(len(entry.sequence.completion) for entry in batch)


def test_a_job_costs_each_prompt_once() -> None:
    job = job_of(("abc", 5), ("abc", 2), ("xy", 1))

    assert job.costs == [8, 2, 3]
    assert job.tokens == 13


def test_sequences_with_the_same_prompt_ride_along_across_jobs() -> None:
    waiting = Waiting(max_batch_tokens=12, layout="shared")
    first, other, second = job_of(("abcd", 2)), job_of(("zzzzzz", 3)), job_of(("abcd", 3))
    for job in (first, other, second):
        waiting.add(job)
    batch = waiting.take()

    assert [entry.job for entry in batch] == [first, second]
    assert tokens_of(batch) == 9
    assert [entry.job for entry in waiting.take()] == [other]


def test_a_group_that_fits_whole_is_not_torn_apart_to_fill_a_batch() -> None:
    waiting = Waiting(max_batch_tokens=20, layout="shared")
    small, group = job_of(("aaaaa", 5)), job_of(("bbbbbbbb", 2), ("bbbbbbbb", 2), ("bbbbbbbb", 2))
    waiting.add(small)
    waiting.add(group)

    assert [entry.job for entry in waiting.take()] == [small]
    assert [entry.job for entry in waiting.take()] == [group] * 3


def test_a_smaller_job_fills_the_place_that_a_group_leaves() -> None:
    waiting = Waiting(max_batch_tokens=20, layout="shared")
    first, group, last = job_of(("aaaaa", 5)), job_of(("bbbbbbbb", 4), ("bbbbbbbb", 4)), job_of(("c", 3))
    for job in (first, group, last):
        waiting.add(job)

    assert {entry.job for entry in waiting.take()} == {first, last}


def test_a_group_larger_than_a_batch_is_spread_over_several() -> None:
    waiting = Waiting(max_batch_tokens=10, layout="shared")
    waiting.add(job_of(*[("abcd", 2)] * 7))

    assert [len(waiting.take()) for _ in range(4)] == [3, 3, 1, 0]


def test_a_sequence_longer_than_the_budget_makes_a_batch_of_its_own() -> None:
    waiting = Waiting(max_batch_tokens=8, layout="shared")
    waiting.add(job_of(("a", 2), ("b" * 20, 5), ("c", 2)))

    assert [tokens_of(waiting.take()) for _ in range(3)] == [3, 25, 3]
    assert waiting.take() == []


@pytest.mark.parametrize("prompts", ["same", "distinct"])
def test_a_small_request_waits_for_at_most_one_batch_of_a_huge_one(prompts: str) -> None:
    waiting = Waiting(max_batch_tokens=100, layout="shared")
    texts = ["p" * 10 if prompts == "same" else f"{number:010d}" for number in range(1000)]
    waiting.add(job_of(*[(text, 10) for text in texts]))
    waiting.take()
    small = job_of(("q", 1))
    waiting.add(small)
    batches = [waiting.take() for _ in range(2)]

    assert small in [entry.job for batch in batches for entry in batch]


def test_a_huge_job_is_added_with_pauses_in_which_others_go_on() -> None:
    waiting = Waiting(max_batch_tokens=10, layout="shared")
    huge, small = job_of(*[(f"{number:06d}", 1) for number in range(5000)]), job_of(("000000", 2), ("zz", 1))
    adding = waiting.adding(huge)
    next(adding)
    waiting.add(small)
    along = waiting.take()
    rest = list(adding)
    taken = [entry for _ in range(6000) for entry in waiting.take()]

    assert {entry.job for entry in along} == {huge, small}
    assert len(rest) == 1
    assert len([entry for entry in [*along, *taken] if entry.job is huge]) == 5000


def test_a_job_removed_while_it_is_added_leaves_nothing_behind() -> None:
    waiting = Waiting(max_batch_tokens=10, layout="shared")
    huge = job_of(*[(f"{number:06d}", 1) for number in range(5000)])
    next(waiting.adding(huge))

    assert len(waiting.remove(huge)) == 5000
    assert waiting.take() == []
    assert not waiting.fills_a_batch()


def test_a_removed_job_leaves_nothing_behind() -> None:
    waiting = Waiting(max_batch_tokens=10, layout="shared")
    gone, stays = job_of(("abc", 2), ("xyz", 2)), job_of(("abc", 1))
    waiting.add(gone)
    waiting.add(stays)

    assert waiting.remove(gone) == [0, 1]
    assert [entry.job for entry in waiting.take()] == [stays]
    assert waiting.num_jobs == 0


def test_a_padded_batch_counts_its_padding() -> None:
    waiting = Waiting(max_batch_tokens=40, layout="padded")
    waiting.add(job_of(("a" * 5, 5), ("b" * 2, 2), ("c" * 5, 5), ("d", 1), ("e", 1)))

    assert [len(waiting.take()) for _ in range(2)] == [4, 1]


jobs = st.lists(st.tuples(st.sampled_from(["", "a", "ab", "abc", "x" * 9]), st.integers(0, 12)), max_size=6)


@given(
    st.lists(jobs, max_size=6),
    st.integers(1, 30),
    st.sampled_from(["shared", "padded"]),
    st.sets(st.integers(0, 5)),
    st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_every_waiting_sequence_is_taken_once_within_the_budget(
    given_jobs: list[list[tuple[str, int]]], budget: int, layout: Layout, removed: set[int], before: int
) -> None:
    waiting = Waiting(budget, layout)
    all_jobs = [job_of(*lengths) for lengths in given_jobs]
    for job in all_jobs:
        waiting.add(job)
    taken = [waiting.take() for _ in range(before)]
    left_out = [
        (job, index) for number, job in enumerate(all_jobs) if number in removed for index in waiting.remove(job)
    ]
    while batch := waiting.take():
        taken.append(batch)
    seen = [(entry.job, entry.index) for batch in taken for entry in batch] + left_out
    everything = [(job, index) for job in all_jobs for index in range(len(job.sequences))]

    assert len(seen) == len(set(seen))
    assert set(seen) == set(everything)
    assert all(len(batch) == 1 or tokens_of(batch) <= budget or rides_along(batch, budget, layout) for batch in taken)
    assert waiting.num_jobs == 0


def rides_along(batch: list[Entry], budget: int, layout: Layout) -> bool:
    """Whether a batch is one long prompt with no more than a budget's worth of completions."""
    (prompt, *others) = {entry.sequence.prompt.tobytes(): len(entry.sequence.prompt) for entry in batch}.values()
    completions = sum(len(entry.sequence.completion) for entry in batch)
    return layout == "shared" and not others and prompt > budget // 2 and completions <= budget


def test_what_waits_fills_a_batch_once_its_tokens_do() -> None:
    waiting = Waiting(max_batch_tokens=12, layout="shared")
    filled = []
    for job in (job_of(("abcd", 3)), job_of(("abcd", 3)), job_of(("z", 1))):
        waiting.add(job)
        filled.append(waiting.fills_a_batch())

    assert filled == [False, False, True]


def test_completions_of_a_prompt_longer_than_the_budget_share_a_batch() -> None:
    waiting = Waiting(max_batch_tokens=40, layout="shared")
    waiting.add(job_of(*[("a" * 100, 15)] * 4))

    assert [len(waiting.take()) for _ in range(3)] == [2, 2, 0]
