"""The sequences that wait for a worker, and which of them make the next batch. No I/O, no clock.

Jobs take turns, a job's turn is a prompt with all that waits for it (from whatever job), and a prompt
whose sequences would fit whole into the next batch is not torn apart to fill up this one.
"""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

from logprobd.messages import Layout
from logprobd.sequences import Failure, Outcome, Sequence


@dataclass(eq=False, slots=True)
class Job:
    """One request's sequences on their way to outcomes. Built off the event loop: it may be large.

    `pending` holds, for each prompt (its ids as bytes), the indices of the sequences that wait.
    `costs[i]` is what sequence i adds to the queue: its completion, and its prompt if it is the prompt's first.
    """

    sequences: list[Sequence]
    costs: list[int] = field(init=False)
    tokens: int = field(init=False)  # all costs together
    pending: OrderedDict[bytes, deque[int]] = field(init=False)
    completion_tokens: dict[bytes, int] = field(init=False)  # that wait, by prompt
    outcomes: list[Outcome | None] = field(init=False)
    num_unanswered: int = field(init=False)
    admitted_at: float = 0.0  # seconds of a clock that is not this module's; 0.0: not yet
    started_at: float = 0.0
    answered_at: float = 0.0

    def __post_init__(self) -> None:
        self.pending, self.costs, self.completion_tokens = OrderedDict(), [], defaultdict(int)
        keys: dict[int, bytes] = {}
        for index, sequence in enumerate(self.sequences):
            key = keys.get(id(sequence.prompt)) or keys.setdefault(id(sequence.prompt), sequence.prompt.tobytes())
            self.costs.append(len(sequence.completion) + (0 if key in self.pending else len(sequence.prompt)))
            self.pending.setdefault(key, deque()).append(index)
            self.completion_tokens[key] += len(sequence.completion)
        self.tokens = sum(self.costs)
        self.outcomes = [None] * len(self.sequences)
        self.num_unanswered = len(self.sequences)

    def answer(self, index: int, outcome: Outcome) -> None:
        """Record one sequence's outcome. Each is answered exactly once."""
        assert self.outcomes[index] is None, "a sequence was answered twice. This is a bug."
        self.outcomes[index] = outcome
        self.num_unanswered -= 1

    def all_outcomes(self) -> list[Outcome]:
        missing = Failure("internal", "a sequence was not answered")
        return [missing if outcome is None else outcome for outcome in self.outcomes]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One sequence in a batch."""

    job: Job
    index: int

    @property
    def sequence(self) -> Sequence:
        return self.job.sequences[self.index]


@dataclass(slots=True)
class Batch:
    """A batch being filled: it carries the budget and says what can still join."""

    max_tokens: int
    layout: Layout
    entries: list[Entry] = field(default_factory=list)
    tokens: int = 0
    _longest: int = 0
    _prompts: set[bytes] = field(default_factory=set)

    def tokens_with(self, key: bytes, sequence: Sequence) -> int:
        """What the batch would compute with this sequence in it."""
        if self.layout == "padded":
            return (len(self.entries) + 1) * max(self._longest, sequence.num_tokens)
        prompt = 0 if key in self._prompts else len(sequence.prompt)
        return self.tokens + prompt + len(sequence.completion)

    def fits(self, key: bytes, sequence: Sequence) -> bool:
        """A sequence longer than the budget makes a batch of its own, which those of its prompt may join.

        What shares a prompt of more than half the budget rides along up to a budget's worth of completions:
        computing the prompt again for each few of them would cost more.
        """
        most = self.max_tokens
        if self.layout == "shared" and key in self._prompts and len(sequence.prompt) > most // 2:
            most += len(sequence.prompt)
        return not self.entries or self.tokens_with(key, sequence) <= most

    def add(self, key: bytes, entry: Entry) -> None:
        self.tokens = self.tokens_with(key, entry.sequence)
        self._longest = max(self._longest, entry.sequence.num_tokens)
        self._prompts.add(key)
        self.entries.append(entry)


@dataclass(slots=True)
class _Prompt:
    """What waits for one prompt: the indices of each job, and their tokens with the prompt counted once."""

    tokens: int
    members: dict[Job, deque[int]] = field(default_factory=dict)


class Waiting:
    """Jobs in the order of their turns, and their sequences by prompt."""

    def __init__(self, max_batch_tokens: int, layout: Layout) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._layout = layout
        self._jobs: OrderedDict[Job, None] = OrderedDict()
        self._prompts: dict[bytes, _Prompt] = {}

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        for key, indices in job.pending.items():
            prompt = self._prompts.setdefault(key, _Prompt(len(job.sequences[indices[0]].prompt)))
            prompt.members[job] = indices
            prompt.tokens += job.completion_tokens[key]
        if job.pending:
            self._jobs[job] = None

    def remove(self, job: Job) -> list[int]:
        """Take a job's waiting sequences out; returns their indices."""
        removed = [index for indices in job.pending.values() for index in indices]
        for key in list(job.pending):
            self._prompts[key].tokens -= job.completion_tokens[key]
            self._forget(job, key)
        return removed

    def fills_a_batch(self) -> bool:
        """Whether what waits would make the next batch a full one."""
        tokens = 0
        for prompt in self._prompts.values():
            tokens += prompt.tokens
            if tokens >= self._max_batch_tokens:
                return True
        return False

    def take(self) -> list[Entry]:
        """The next batch, out of the queue; empty if nothing waits."""
        batch = Batch(self._max_batch_tokens, self._layout)
        share = max(1, self._max_batch_tokens // max(1, len(self._jobs)))
        took = True
        while took and batch.tokens < self._max_batch_tokens:
            took = False
            for job in list(self._jobs):
                if job in self._jobs and self._take_turn(job, batch, share):
                    took = True
        return batch.entries

    def _take_turn(self, job: Job, batch: Batch, share: int) -> bool:
        """Take whole prompts of a job until it had its share; false if nothing of it went in."""
        before = batch.tokens
        while job.pending and batch.tokens - before < share:
            key = next(iter(job.pending))
            if not self._should_start(key, batch) or not self._take_prompt(key, batch):
                break
        if job in self._jobs and batch.tokens > before:
            self._jobs.move_to_end(job)
        return batch.tokens > before

    def _should_start(self, key: bytes, batch: Batch) -> bool:
        """Whether to start on a prompt now: it fits, or it would have to be split in any batch."""
        tokens = self._prompts[key].tokens
        return not batch.entries or tokens > self._max_batch_tokens or tokens + batch.tokens <= self._max_batch_tokens

    def _take_prompt(self, key: bytes, batch: Batch) -> bool:
        """Move what waits for a prompt into the batch, as far as it fits; true if all of it did."""
        prompt = self._prompts[key]
        for job, indices in list(prompt.members.items()):
            while indices:
                entry = Entry(job, indices[0])
                if not batch.fits(key, entry.sequence):
                    return False
                batch.add(key, entry)
                prompt.tokens -= len(entry.sequence.completion)
                job.completion_tokens[key] -= len(entry.sequence.completion)
                indices.popleft()
            self._forget(job, key)
        return True

    def _forget(self, job: Job, key: bytes) -> None:
        """Nothing of this job waits for this prompt any more."""
        del self._prompts[key].members[job]
        if not self._prompts[key].members:
            del self._prompts[key]
        del job.pending[key]
        if not job.pending:
            self._jobs.pop(job, None)
