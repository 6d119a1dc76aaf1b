"""Scores with a model loaded for the run: worker processes, one a device, as `logprobd serve` has them."""

import asyncio
from collections.abc import Sequence as Seq
from typing import Any

from logprobd.dialects import native
from logprobd.dialects.plans import ServedModel
from logprobd.errors import ApiError
from logprobd.offline.batches import Answer, Batch, Piece, Scored, error_at, failed, request_of
from logprobd.offline.rows import Columns, Row
from logprobd.offline.settings import ScoreSettings
from logprobd.sequences import Failure, Outcome
from logprobd.supervisor import Supervisor
from logprobd.tokenizer import tokenizer_of
from logprobd.waiting import Job, Waiting
from logprobd.worker import Worker


class Workers:
    """A backend of worker processes. Two batches a worker: one is on its way while one runs."""

    def __init__(self, settings: ScoreSettings, columns: Columns) -> None:
        self._settings, self._columns = settings, columns
        self._request = request_of(settings)
        self._supervisor = Supervisor(settings)
        self._served: ServedModel | None = None
        self.plan: dict[str, Any] = {}
        self.lanes = 2 * len(self._supervisor.workers)
        self._free: asyncio.Queue[Worker] = asyncio.Queue()
        for _ in range(2):  # a lane of every worker before the second of any
            for worker in self._supervisor.workers:
                self._free.put_nowait(worker)

    async def keep_alive(self) -> None:
        """Runs the workers; raises ModelRefused if one refuses the model."""
        await self._supervisor.run()

    async def open(self, plan: dict[str, Any] | None) -> ServedModel:
        """Wait for the first worker: the others join when they are up."""
        ready = await self._supervisor.first_ready()
        limit = min(ready.model.max_positions, ready.memory.longest_sequence)
        self._served = ServedModel(ready.model, tokenizer_of(ready.tokenizer), limit)
        full = self._settings.max_batch_tokens or ready.memory.max_pass_tokens
        self.plan = plan or {"layout": ready.selftest.layout, "max_batch_tokens": full}
        return self._served

    @property
    def served(self) -> ServedModel:
        assert self._served is not None, "nothing is scored before the model is there. This is a bug."
        return self._served

    def batches(self, rows: Seq[Row]) -> list[Batch]:
        """What shares a prompt comes together, wherever it stands in the section."""
        pieces: list[Piece] = []
        answers: list[Answer] = []
        lost = 0
        for row in rows:
            try:
                group = native.plan_group(self._request, row.group, self.served)
            except ApiError as error:
                answers += [failed(row, number, error, self._columns) for number in range(len(row.group.completions))]
                lost += row.weight
                continue
            pieces += [Piece(row, number, sequence) for number, sequence in enumerate(group.sequences)]
        batches = [Batch([], answers, lost)] if answers else []
        return batches + self._cut(pieces)

    def _cut(self, pieces: list[Piece]) -> list[Batch]:
        """Batches as the service would form them if all pieces were one request's."""
        job = Job([piece.sequence for piece in pieces if piece.sequence is not None])
        waiting = Waiting(self.plan["max_batch_tokens"], self.plan["layout"])
        waiting.add(job)
        batches = []
        while entries := waiting.take():
            batches.append(Batch([pieces[entry.index] for entry in entries]))
        return batches

    async def score(self, batch: Batch) -> Scored:
        sequences = [piece.sequence for piece in batch.pieces if piece.sequence is not None]
        worker = await self._free.get()
        try:
            outcomes = await self._supervisor.score(worker, sequences)
        finally:
            self._free.put_nowait(worker)
        answers = [self._answer(piece, outcome) for piece, outcome in zip(batch.pieces, outcomes, strict=True)]
        tokens = sum(len(sequence.completion) for sequence in sequences)
        prompts = sum(len(piece.sequence.prompt) for piece in batch.pieces if piece.sequence and not piece.completion)
        return Scored(answers, tokens + prompts)

    def _answer(self, piece: Piece, outcome: Outcome) -> Answer:
        if isinstance(outcome, Failure):
            error = error_at(piece.completion, outcome.code, outcome.message)
            return failed(piece.row, piece.completion, error, self._columns)
        assert piece.sequence is not None, "a worker's pieces are tokenized here. This is a bug."
        parts = native.completion_reply(
            self._request, piece.sequence, outcome, self._request.tokens, self.served.tokenizer
        )
        return Answer(piece.row.number, piece.completion, parts)
