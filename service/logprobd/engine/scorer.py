"""Scores sequences with a loaded model: lay out, one forward pass, selective logprobs.

Knows nothing of processes, queues or HTTP: the worker, `logprobd check` and the self-test call it alike.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from logprobd.engine.attention import Backend, TreeAttention, Windows
from logprobd.engine.head import ModelHead
from logprobd.engine.model import LoadedModel
from logprobd.engine.packing import pack
from logprobd.engine.rope import length_classes
from logprobd.engine.selective import Selected, Targets, select
from logprobd.messages import Layout
from logprobd.sequences import Failure, IntArray, Outcome, Scores, Sequence

HEAD_CHUNK_BYTES = 24 << 20  # float32 logits that exist at a time; small enough to stay in a CPU's cache

# Packed rows are filled up to whole vectors for each thread: elementwise kernels round the last few numbers
# of a thread's stretch differently, and where that falls must not depend on the company of a sequence.
ROW_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """The last hidden states of a batch, (num_rows, hidden_size), and where each sequence reads them.

    `rows[i]` are the rows that predict sequence i's completion tokens; `computed[i]` is the number of
    tokens that went through the model on its account.
    """

    states: torch.Tensor
    rows: tuple[IntArray, ...]
    computed: IntArray


class Scorer:
    """A model ready to score, in one of the two layouts."""

    def __init__(self, loaded: LoadedModel, layout: Layout, backend: Backend | None = None) -> None:
        self.loaded = loaded
        self.model, self.device = loaded.model, loaded.device
        self.layout = layout
        self.head = ModelHead(loaded.model, loaded.head_dtype)
        self.attention: TreeAttention | None = None
        self._length_class = length_classes(loaded.model.config)
        self._chunk_rows = max(16, HEAD_CHUNK_BYTES // (4 * loaded.info.vocab_size))
        if layout == "shared":
            self.attention = TreeAttention(backend or ("flex" if self.device.type == "cuda" else "nodes"))
            self.model.set_attn_implementation(self.attention.name)

    @property
    def windows(self) -> Windows:
        """The window of each module that has attended over a tree so far."""
        return {} if self.attention is None else self.attention.windows

    @torch.inference_mode()
    def score(self, sequences: Seq[Sequence]) -> list[Outcome]:
        """One outcome a sequence, in order. Out of memory halves the batch; it is never raised."""
        outcomes = self._score_within_memory(sequences)
        # A NaN reaches others of its batch through attention (masked, it counts zero times NaN): alone,
        # only the sequence that it belongs to still has it.
        suspects = [index for index, outcome in enumerate(outcomes) if is_non_finite(outcome)]
        for index in suspects if len(sequences) > 1 else ():
            outcomes[index] = self._score_within_memory([sequences[index]])[0]
        return outcomes

    def _score_within_memory(self, sequences: Seq[Sequence]) -> list[Outcome]:
        try:
            return self._score(sequences)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(sequences) == 1:
            return [Failure("out_of_memory", f"a sequence of {sequences[0].num_tokens} tokens does not fit in memory")]
        middle = len(sequences) // 2
        return self._score_within_memory(sequences[:middle]) + self._score_within_memory(sequences[middle:])

    def _score(self, sequences: Seq[Sequence]) -> list[Outcome]:
        classes: dict[int, list[int]] = defaultdict(list)
        for index, sequence in enumerate(sequences):
            if len(sequence.completion):
                classes[self._length_class(sequence.num_tokens)].append(index)
        outcomes: list[Outcome] = [nothing_to_score(sequence) for sequence in sequences]
        for indices in classes.values():
            for index, outcome in zip(indices, self._score_class([sequences[i] for i in indices]), strict=True):
                outcomes[index] = outcome
        return outcomes

    def _score_class(self, sequences: list[Sequence]) -> list[Outcome]:
        """Score sequences of one length class: their positions are encoded alike."""
        with self._autocast():
            hidden = self._shared(sequences) if self.layout == "shared" else self._padded(sequences)
            targets = targets_of(sequences, hidden.rows)
            selected = select(self.head, hidden.states, targets, self._chunk_rows)
        return split(selected, sequences, hidden.computed)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.loaded.autocast else nullcontext()

    def _inputs(self, sequences: list[Sequence]) -> list[IntArray]:
        """What of each sequence goes through the model: its last token predicts nothing that is asked.

        Where positions are encoded by the sequence's length it goes all the same, as in the model's own forward.
        """
        keep_last = self._length_class.original_positions is not None
        return [np.concatenate([s.prompt, s.completion if keep_last else s.completion[:-1]]) for s in sequences]

    def _shared(self, sequences: list[Sequence]) -> Hidden:
        assert self.attention is not None
        tree = pack(self._inputs(sequences))
        with self.attention.over(tree, self.device):
            states = self.head.backbone(
                input_ids=self._packed_row(tree.ids), position_ids=self._packed_row(tree.positions), use_cache=False
            )[0]
        rows = tuple(path[scored_positions(s)] for path, s in zip(tree.paths, sequences, strict=True))
        return Hidden(states[0], rows, tree.contributed)

    def _packed_row(self, values: IntArray) -> torch.Tensor:
        """One row for the model, (1, tokens), filled up with zeros that nothing attends to."""
        padded = np.pad(values.astype(np.int64), (0, -len(values) % ROW_MULTIPLE))
        return torch.from_numpy(padded).to(self.device)[None]

    def _padded(self, sequences: list[Sequence]) -> Hidden:
        inputs = self._inputs(sequences)
        lengths = np.array([len(ids) for ids in inputs])
        longest = int(lengths.max())
        ids = np.zeros((len(inputs), longest), dtype=np.int64)
        for row, sequence_ids in zip(ids, inputs, strict=True):
            row[: len(sequence_ids)] = sequence_ids
        # On the right, where causal layers cannot see it. Without padding no mask is given: it is slower.
        mask = torch.from_numpy(np.arange(longest) < lengths[:, None]).long().to(self.device)
        states = self.head.backbone(
            input_ids=torch.from_numpy(ids).to(self.device),
            attention_mask=None if (lengths == longest).all() else mask,
            use_cache=False,
        )[0]
        rows = tuple(
            np.arange(longest, dtype=np.int32)[scored_positions(s)] + np.int32(index * longest)
            for index, s in enumerate(sequences)
        )
        return Hidden(states.flatten(0, 1), rows, lengths.astype(np.int32))


def scored_positions(sequence: Sequence) -> slice:
    """The positions whose rows predict the completion: the last of the prompt to the last but one."""
    first = len(sequence.prompt) - 1
    return slice(first, first + len(sequence.completion))


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has a class of its own for this on CUDA, and only a sentence on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def is_non_finite(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.code == "non_finite_logits"


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
    )
