"""Reads the whole input once before anything is scored: what is wrong with it is said now, not after hours."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from logprobd.offline.files import Input
from logprobd.offline.rows import Columns, Row, form_of, row_of


@dataclass(slots=True)
class Records:
    """The rows that had more of something than every row before them: the first over any limit is among these."""

    rows: list[tuple[int, int]] = field(default_factory=list)  # (how much, row number)

    def note(self, amount: int, number: int) -> None:
        if not self.rows or amount > self.rows[-1][0]:
            self.rows.append((amount, number))

    def first_over(self, limit: int) -> int | None:
        """The number of the first row with more than `limit`; None if there is none."""
        return next((number for amount, number in self.rows if amount > limit), None)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the rows hold: their number, how completions come, about how many tokens, and the extremes of ids."""

    num_rows: int
    grouped: bool
    weight: int
    highest_id: Records
    longest: Records

    def first_impossible(self, vocab_size: int, max_sequence_tokens: int) -> int | None:
        """The first row of ids that a model with these limits cannot score, as far as that is known of ids."""
        found = (self.highest_id.first_over(vocab_size - 1), self.longest.first_over(max_sequence_tokens))
        return min((number for number in found if number is not None), default=None)


def survey(source: Input, columns: Columns) -> Survey:
    """Check every row; raises RefusedError for the first that no model could score."""
    grouped = source.grouped
    num_rows = weight = 0
    highest_id, longest = Records(), Records()
    for cells in source.cells():
        num_rows += 1
        if grouped is None and (form := form_of(cells.completion)) is not None:
            grouped = form == "several"
        row = row_of(cells, columns, bool(grouped))
        weight += row.weight
        note_ids(row, highest_id, longest)
    return Survey(num_rows, bool(grouped), weight, highest_id, longest)


def note_ids(row: Row, highest_id: Records, longest: Records) -> None:
    """Take down the extremes of a row of ids; of text, nothing is known before it is tokenized."""
    given = [row.prompt, *row.group.completions]
    ids = [value for value in given if isinstance(value, np.ndarray)]
    if len(ids) == len(given):
        highest_id.note(max(int(value.max(initial=0)) for value in ids), row.number)
        longest.note(len(row.prompt) + max(map(len, row.group.completions), default=0), row.number)


def digest_of(path: Path) -> str:
    """A digest of a file's content, as 32 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
