"""A plan as a few long arrays, which travel between processes without an object for each sequence."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logprobd.dialects.plans import Form, Plan, PlannedGroup
from logprobd.sequences import Candidates, IntArray, Options, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class FlatCandidates:
    """All candidate ids one after the other, how many each completion token has, and which completions have any."""

    ids: IntArray
    lengths: IntArray
    given: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class FlatPlan:
    """Prompts and completions one after the other, with their lengths and the number of completions a prompt."""

    request: Any
    form: Form
    options: Options
    prompt_ids: IntArray
    prompt_lengths: IntArray
    completions_per_prompt: IntArray
    completion_ids: IntArray
    completion_lengths: IntArray
    spell_prompts: NDArray[np.bool_]
    spell_completions: NDArray[np.bool_]
    candidates: FlatCandidates | None


def flatten(plan: Plan) -> FlatPlan:
    sequences = plan.sequences
    prompts, completions = [group.prompt for group in plan.groups], [sequence.completion for sequence in sequences]
    return FlatPlan(
        request=plan.request,
        form=plan.form,
        options=sequences[0].options if sequences else Options(),
        prompt_ids=joined(prompts),
        prompt_lengths=lengths_of(prompts),
        completions_per_prompt=lengths_of([group.sequences for group in plan.groups]),
        completion_ids=joined(completions),
        completion_lengths=lengths_of(completions),
        spell_prompts=np.array([group.spell_prompt for group in plan.groups], dtype=bool),
        spell_completions=np.array([spell for group in plan.groups for spell in group.spell_completions], dtype=bool),
        candidates=flat_candidates([sequence.candidates for sequence in sequences]),
    )


def flat_candidates(candidates: list[Candidates | None]) -> FlatCandidates | None:
    given = [asked for asked in candidates if asked is not None]
    if not given:
        return None
    return FlatCandidates(
        joined([asked.ids for asked in given]),
        joined([asked.lengths for asked in given]),
        np.array([asked is not None for asked in candidates], dtype=bool),
    )


def unflatten(flat: FlatPlan) -> Plan:
    """The plan again, its arrays being views. Plain loops, between whose steps another thread may run."""
    prompts = pieces(flat.prompt_ids, flat.prompt_lengths)
    completions = iter(pieces(flat.completion_ids, flat.completion_lengths))
    candidates = iter(candidates_of(flat))
    spell = iter(flat.spell_completions.tolist())
    groups = []
    for prompt, count, spelled in zip(
        prompts, flat.completions_per_prompt.tolist(), flat.spell_prompts.tolist(), strict=True
    ):
        sequences = [Sequence(prompt, next(completions), flat.options, next(candidates)) for _ in range(count)]
        groups.append(PlannedGroup(prompt, sequences, spelled, [next(spell) for _ in range(count)]))
    return Plan(flat.request, groups, flat.form)


def candidates_of(flat: FlatPlan) -> list[Candidates | None]:
    """What each completion asks for."""
    if flat.candidates is None:
        return [None] * len(flat.completion_lengths)
    given = flat.candidates.given
    by_completion = iter(pieces(flat.candidates.lengths, flat.completion_lengths[given]))
    ids, at = flat.candidates.ids, 0
    asked: list[Candidates | None] = []
    for is_given in given.tolist():
        if not is_given:
            asked.append(None)
            continue
        lengths = next(by_completion)
        end = at + int(lengths.sum())
        asked.append(Candidates(ids[at:end], lengths))
        at = end
    return asked


def pieces(values: IntArray, lengths: IntArray) -> list[IntArray]:
    """Views of so many values each, one after the other."""
    return [values[start:end] for start, end in pairwise(accumulate(lengths.tolist(), initial=0))]


def joined(arrays: list[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])


def lengths_of(items: list[IntArray] | list[list[Sequence]]) -> IntArray:
    return np.array([len(item) for item in items], dtype=np.int32)
