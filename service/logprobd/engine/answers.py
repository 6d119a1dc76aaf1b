"""Between sequences and what selective.py computes: all tokens of a batch in, each sequence's answer out."""

from collections.abc import Sequence as Seq

import numpy as np

from logprobd.engine.selective import Selected, Targets
from logprobd.sequences import Failure, IntArray, Outcome, Scores, Sequence


def nothing_to_score(sequence: Sequence) -> Scores:
    """The answer to an empty completion."""
    none = np.zeros(0, dtype=np.float32)
    k = sequence.options.top_logprobs
    return Scores(
        logprobs=none,
        entropy=none if sequence.options.entropy else None,
        top_ids=np.zeros((0, k), dtype=np.int32) if k else None,
        top_logprobs=np.zeros((0, k), dtype=np.float32) if k else None,
        candidate_logprobs=none if sequence.candidates is not None else None,
        computed_tokens=0,
        ranks=np.zeros(0, dtype=np.int32) if sequence.options.ranks else None,
    )


def targets_of(sequences: list[Sequence], rows: Seq[IntArray]) -> Targets:
    """All completion tokens of a batch, one after the other."""
    lengths = [len(sequence.completion) for sequence in sequences]
    options = [sequence.options for sequence in sequences]
    asked = [
        (start, sequence.candidates)
        for start, sequence in zip(np.cumsum([0, *lengths[:-1]]), sequences, strict=True)
        if sequence.candidates is not None
    ]
    nothing = [np.zeros(0, dtype=np.int32)]
    return Targets(
        rows=np.concatenate(rows),
        ids=np.concatenate([sequence.completion for sequence in sequences]),
        temperatures=np.repeat(np.array([o.temperature for o in options]), lengths),
        entropy=np.repeat(np.array([o.entropy for o in options]), lengths),
        top_logprobs=np.repeat(np.array([o.top_logprobs for o in options], dtype=np.int32), lengths),
        ranks=np.repeat(np.array([o.ranks for o in options]), lengths),
        candidate_ids=np.concatenate([c.ids for _, c in asked] or nothing),
        candidate_owners=np.concatenate(
            [np.repeat(np.arange(len(c.lengths)) + start, c.lengths).astype(np.int32) for start, c in asked] or nothing
        ),
    )


def split(selected: Selected, sequences: list[Sequence], computed: IntArray) -> list[Outcome]:
    """Hand the answers of a batch to its sequences."""
    outcomes: list[Outcome] = []
    token = candidate = 0
    for sequence, num_computed in zip(sequences, computed.tolist(), strict=True):
        tokens = slice(token, token := token + len(sequence.completion))
        asked = 0 if sequence.candidates is None else len(sequence.candidates.ids)
        candidates = slice(candidate, candidate := candidate + asked)
        outcomes.append(outcome_of(selected, sequence, tokens, candidates, num_computed))
    return outcomes


def outcome_of(selected: Selected, sequence: Sequence, tokens: slice, candidates: slice, computed: int) -> Outcome:
    logprobs = selected.logprobs[tokens]
    if (bad := np.isnan(logprobs)).any():
        return Failure(
            "non_finite_logits",
            f"the model gave NaN or infinite logits at completion token {int(bad.argmax())}",
        )
    k = sequence.options.top_logprobs
    return Scores(
        logprobs=logprobs,
        entropy=selected.entropy[tokens] if sequence.options.entropy else None,
        top_ids=selected.top_ids[tokens, :k] if k else None,
        top_logprobs=selected.top_logprobs[tokens, :k] if k else None,
        candidate_logprobs=None if sequence.candidates is None else selected.candidate_logprobs[candidates],
        computed_tokens=computed,
        ranks=selected.ranks[tokens] if sequence.options.ranks else None,
    )
