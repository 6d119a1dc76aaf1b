"""One run: read everything once, score section by section what the journal lacks, write the output."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from logprobd.dialects.native import options_of, plan_group
from logprobd.dialects.plans import ServedModel, identity
from logprobd.errors import ApiError
from logprobd.offline.batches import Answer, Backend, Batch, request_of
from logprobd.offline.failures import RefusedError, StoppedError
from logprobd.offline.files import Input, format_of, open_input, require_libraries
from logprobd.offline.journal import Journal, require_same
from logprobd.offline.output import Joined, put_in_place, write
from logprobd.offline.progress import Progress
from logprobd.offline.rows import ERROR_COLUMN, Columns, Row, columns_of, complaint, row_of
from logprobd.offline.settings import ScoreSettings
from logprobd.offline.survey import digest_of, survey
from logprobd.offline.workers import Workers

# Options that answers, or the batches they come in, depend on: a run goes on only with the same.
OPTIONS = (
    "prompt_column",
    "completion_column",
    "temperature",
    "reduce",
    "top_logprobs",
    "entropy",
    "tokens",
    "no_special_tokens",
    "max_batch_tokens",
    "section_rows",
)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did, all its attempts together."""

    rows: int
    failed: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """A batch and its place in the journal."""

    section: int
    number: int
    out_of: int
    batch: Batch


def run(settings: ScoreSettings, given: Path, out: Path) -> Summary:
    """Score a file into another; raises RefusedError, StoppedError or ModelRefused, each with a sentence."""
    formats = {format_of(given), format_of(out)}
    require_libraries(formats)
    if settings.url is not None and find_spec("httpx") is None:
        raise RefusedError("--url needs httpx: pip install 'logprobd[remote]'")
    if not out.parent.is_dir():
        raise RefusedError(f"{out}: there is no folder {out.parent}")
    if out.exists() and given.exists() and out.samefile(given):
        raise RefusedError(f"{out} is the input itself: give another name")
    columns = columns_of(settings)
    source = open_input(given, columns, format_of(out))
    journal = Journal(out.with_name(out.name + ".partial"))
    try:
        return _Run(settings, given, out, columns, source, journal).run()
    finally:
        journal.close()


class _Run:
    """The state of a run: what is read, what is known, and the journal."""

    def __init__(
        self, settings: ScoreSettings, given: Path, out: Path, columns: Columns, source: Input, journal: Journal
    ) -> None:
        self._settings, self._given, self._out, self._columns = settings, given, out, columns
        self._source, self._journal = source, journal
        self._written = out.with_name(out.name + ".writing")
        self._turn = asyncio.Lock()  # of those who write to the journal

    def run(self) -> Summary:
        stamp = stamp_of(self._given)
        self._about = about(self._settings, digest_of(self._given))
        self._hold_against_journal()
        self._survey = survey(self._source, self._columns)
        if format_of(self._out) == "parquet":
            _ = self._source.arrow_schema  # which may be refused
        if self._journal.header is None or not self._is_complete():
            self._score_missing()
        if stamp_of(self._given) != stamp:
            raise StoppedError(f"{self._given} was changed while it was read")
        return self._finish()

    def _hold_against_journal(self) -> None:
        """Refuse to go on with other options than those begun with, and to replace what is not this run's own."""
        header, overwrite = self._journal.header, self._settings.overwrite
        if header is not None:
            try:
                require_same(self._journal.path, header["about"], self._about)
            except RefusedError:
                if not overwrite:
                    raise
                self._journal.forget()
        if self._out.exists() and not overwrite and not self._is_in_place():
            raise RefusedError(f"{self._out} exists: give another name, or --overwrite to replace it")

    def _is_in_place(self) -> bool:
        """Whether the run ended after its output had got its name, and before it could take the journal away."""
        return self._journal.finished and self._out.exists() and not self._written.exists()

    def _is_complete(self) -> bool:
        num_sections = -(-self._survey.num_rows // self._settings.section_rows)
        return all(self._journal.sections[number].is_complete for number in range(num_sections))

    def _score_missing(self) -> None:
        if self._survey.num_rows == 0:
            self._journal.begin({"about": self._about, "model": None, "plan": None})
            return
        backend = backend_of(self._settings, self._columns)
        asyncio.run(self._score_with(backend))

    async def _score_with(self, backend: Backend) -> None:
        """Until all is scored, or the backend is gone for good."""
        alive = asyncio.ensure_future(backend.keep_alive())
        work = asyncio.ensure_future(self._score_sections(backend))
        try:
            await asyncio.wait({alive, work}, return_when=asyncio.FIRST_COMPLETED)
            (work if work.done() else alive).result()
        finally:
            for task in (work, alive):
                task.cancel()
            await asyncio.gather(work, alive, return_exceptions=True)

    async def _score_sections(self, backend: Backend) -> None:
        header = self._journal.header
        served = await backend.open(None if header is None else header["plan"])
        self._hold_against_model(served, backend)
        waiting: asyncio.Queue[_Work | None] = asyncio.Queue(backend.lanes)
        with Progress(self._survey.weight, self._journal.weight) as progress:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._feed(backend, waiting))
                    for _ in range(backend.lanes):
                        group.create_task(self._work(backend, waiting, progress))
            except* StoppedError as stopped:
                raise stopped.exceptions[0] from None

    def _hold_against_model(self, served: ServedModel, backend: Backend) -> None:
        """Refuse to go on with another model, and rows of ids that this one cannot score, before any is scored."""
        header, model = self._journal.header, identity(served.info)
        if header is not None:
            try:
                require_same(self._journal.path, header["model"], model)
            except RefusedError:
                if not self._settings.overwrite:
                    raise
                header = None
        self._require_possible(served)
        if header is None:
            self._journal.begin({"about": self._about, "model": model, "plan": backend.plan})

    def _require_possible(self, served: ServedModel) -> None:
        request = request_of(self._settings)
        try:
            options_of(request, served)
        except ApiError as error:
            raise RefusedError(f"--{error.message.replace('_', '-', 1)}") from None
        number = self._survey.first_impossible(served.info.vocab_size, served.max_sequence_tokens)
        if number is None or self._settings.keep_going:
            return
        row = next(self._rows(number))
        try:
            plan_group(request, row.group, served)
        except ApiError as error:
            raise RefusedError(f"{row.place}: {complaint(error, self._columns, row.grouped)}") from None

    def _rows(self, first: int) -> Iterator[Row]:
        for cells in self._source.cells(first):
            yield row_of(cells, self._columns, self._survey.grouped)

    def _sections(self) -> Iterator[tuple[int, list[Row]]]:
        """The sections that are not done, each with its number."""
        number = 0
        while self._journal.sections[number].is_complete:
            number += 1
        rows = self._rows(number * self._settings.section_rows)
        while section := list(islice(rows, self._settings.section_rows)):
            if not self._journal.sections[number].is_complete:
                yield number, section
            number += 1

    async def _feed(self, backend: Backend, waiting: "asyncio.Queue[_Work | None]") -> None:
        """Cut sections into batches while others are scored, and hand out those that are not done."""
        sections = self._sections()
        while (section := await asyncio.to_thread(next, sections, None)) is not None:
            number, rows = section
            batches = await asyncio.to_thread(backend.batches, rows) or [Batch([])]
            for index, batch in enumerate(batches):
                if index not in self._journal.sections[number].batches:
                    await waiting.put(_Work(number, index, len(batches), batch))
        for _ in range(backend.lanes):
            await waiting.put(None)

    async def _work(self, backend: Backend, waiting: "asyncio.Queue[_Work | None]", progress: Progress) -> None:
        """Score and keep one batch after the other."""
        while (work := await waiting.get()) is not None:
            answers, tokens = list(work.batch.failed), 0
            if work.batch.pieces:
                scored, tokens = await backend.score(work.batch)
                answers += scored
            self._stop_at_failure(work.batch, answers)
            async with self._turn:
                await asyncio.to_thread(
                    self._journal.add, work.section, work.number, work.out_of, work.batch.weight, tokens, answers
                )
            progress.advance(work.batch.weight, tokens)

    def _stop_at_failure(self, batch: Batch, answers: list[Answer]) -> None:
        """Without --keep-going a failed row ends the run; its batch is not kept, so that it is tried again."""
        bad = next((answer for answer in answers if ERROR_COLUMN in answer.parts), None)
        if bad is not None and not self._settings.keep_going:
            place = next(cells.place for cells in self._source.cells(bad.row))
            raise StoppedError(f"{place}: {bad.parts[ERROR_COLUMN]}; what was scored is kept")

    def _finish(self) -> Summary:
        """Write the output, give it its name, and only then let go of the journal."""
        joined = Joined(self._journal.answers(), self._source, self._columns, self._survey.grouped)
        if self._is_in_place():
            for _ in joined:  # to count
                pass
        else:
            write(self._written, format_of(self._out), self._source, joined)
            self._journal.finish()
            put_in_place(self._written, self._out)
        tokens = self._journal.tokens
        self._journal.remove()
        return Summary(self._survey.num_rows, joined.failed, tokens)


def about(settings: ScoreSettings, digest: str) -> dict[str, Any]:
    """What a run is held against when it is gone on with."""
    values = settings.model_dump(include=set(OPTIONS))
    options = {f"--{name.replace('_', '-')}": values[name] for name in OPTIONS}
    return options | {"the input (digest)": digest, "scoring": "through --url" if settings.url else "by itself"}


def backend_of(settings: ScoreSettings, columns: Columns) -> Backend:
    if settings.url is None:
        return Workers(settings, columns)
    from logprobd.offline.remote import Remote  # httpx is loaded only where it is used

    return Remote(settings, columns)


def stamp_of(path: Path) -> tuple[int, int]:
    """What changes when somebody writes to a file."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
