"""Scores sequences with a loaded model: lay out, forward passes, selective logprobs.

Knows nothing of processes, queues or HTTP: the worker, `logprobd check` and the self-test call it alike.
"""

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext

import torch

from logprobd.engine.answers import nothing_to_score, split, targets_of
from logprobd.engine.attention import Backend, Windows
from logprobd.engine.blocks import ROWS
from logprobd.engine.budget import PassBudget
from logprobd.engine.head import ModelHead
from logprobd.engine.layouts import PaddedLayout, SharedLayout
from logprobd.engine.model import LoadedModel
from logprobd.engine.rope import length_classes
from logprobd.engine.selective import select
from logprobd.messages import Layout
from logprobd.sequences import Failure, Outcome, Sequence

CHUNK_BYTES = 24 << 20  # of float32 logits at a time, until a memory plan says how many


class Scorer:
    """A model ready to score, in one of the two layouts.

    `budget` bounds the tokens of one forward pass; without a memory plan there is no bound.
    """

    def __init__(self, loaded: LoadedModel, layout: Layout, backend: Backend | None = None) -> None:
        self.loaded = loaded
        self.model, self.device = loaded.model, loaded.device
        self.layout = layout
        self.budget = PassBudget()
        self.release: Callable[[], None] = nothing  # give back what the allocator keeps; a meter's (see memory.py)
        self.alone = False  # each sequence in passes of its own (--batch-invariant)
        self.ranks = loaded.ranks
        self.head = ModelHead(loaded.model, loaded.head_dtype, loaded.ranks)
        self._length_class = length_classes(loaded.model.config)
        # Of the logits of a sharded head, each process has its part.
        self.logits_width = -(-loaded.info.vocab_size // self.head.vocabulary.ranks.size)
        self.chunk_rows = rows_of_logits(CHUNK_BYTES, self.logits_width)
        self.laying: SharedLayout | PaddedLayout = (
            SharedLayout(loaded, self.head.backbone, self._length_class, backend)
            if layout == "shared"
            else PaddedLayout(loaded, self.head.backbone, self._length_class)
        )

    @property
    def windows(self) -> Windows:
        """The window of each module that has attended over a tree so far."""
        return self.laying.windows

    @torch.inference_mode()
    def score(self, sequences: Seq[Sequence]) -> list[Outcome]:
        """One outcome a sequence, in order. Out of memory is met with smaller passes; it is never raised."""
        if self.alone:
            return [outcome for sequence in sequences for outcome in self._score_within_memory([sequence])]
        outcomes = self._score_within_memory(sequences)
        # A NaN reaches others of its batch through attention (masked, it counts zero times NaN): alone,
        # only the sequence that it belongs to still has it.
        suspects = [index for index, outcome in enumerate(outcomes) if is_non_finite(outcome)]
        for index in suspects if len(sequences) > 1 else ():
            outcomes[index] = self._score_within_memory([sequences[index]])[0]
        return outcomes

    def _score_within_memory(self, sequences: Seq[Sequence]) -> list[Outcome]:
        try:
            outcomes = self._score(sequences)
        except RuntimeError as error:
            # Of several processes that compute together the others would wait for this one: all end, and start anew.
            if not is_out_of_memory(error) or self.ranks.size > 1:
                raise
        else:
            self.budget.held()
            return outcomes
        # Outside the except clause: the error's traceback holds the failed pass's tensors.
        self.release()
        return self._score_with_less(sequences)

    def _score_with_less(self, sequences: Seq[Sequence]) -> list[Outcome]:
        """Try again with passes half as large, or where they cannot be, half the sequences."""
        if self.budget.halve(sum(sequence.num_tokens for sequence in sequences)):
            return self._score_within_memory(sequences)
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
        for members in classes.values():
            lengths = {index: sequences[index].num_tokens for index in members}
            for part in self.laying.parts(lengths, self.budget.tokens):
                for index, outcome in zip(part, self._score_part([sequences[i] for i in part]), strict=True):
                    outcomes[index] = outcome
        return outcomes

    def _score_part(self, sequences: list[Sequence]) -> list[Outcome]:
        """Score sequences whose positions are encoded alike."""
        with self._autocast():
            laid_out = self.laying.lay_out(sequences, self.budget)
            targets = targets_of(sequences, laid_out.rows)
            selected = select(self.head, laid_out.passes, targets, self.chunk_rows, self.device, self.head.vocabulary)
        return split(selected, sequences, laid_out.computed)

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.loaded.autocast else nullcontext()


def rows_of_logits(num_bytes: int, width: int) -> int:
    """How many rows of so many float32 logits make a chunk of about so many bytes."""
    return max(ROWS, num_bytes // (4 * width) // ROWS * ROWS)


def nothing() -> None: ...


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has a class of its own for this on CUDA, and only a sentence on a CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def is_non_finite(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.code == "non_finite_logits"
