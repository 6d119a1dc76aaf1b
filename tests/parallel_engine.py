"""One of two processes that score sequences with models spread over both; the first writes what came out.

    python tests/parallel_engine.py RANK FD ASKED OUT

FD is where they meet, ASKED a pickled list of (settings, sequences), OUT the file for the list of answers.
"""

import pickle
import sys
from pathlib import Path

import torch

from logprobd.engine.blocks import ROWS
from logprobd.engine.group import meet
from logprobd.engine.model import text_config
from logprobd.engine.preparing import prepare
from logprobd.engine.ranks import Ranks
from logprobd.messages import Start
from logprobd.sequences import Sequence
from logprobd.settings import ModelSettings

WINDOW = 16  # tokens of a pass, when everything is scored once more in windows


def answers(settings: ModelSettings, sequences: list[Sequence], ranks: Ranks) -> dict[str, object]:
    spread = settings.model_copy(update={"devices": "cpu+cpu"})
    prepared = prepare(Start(spread, "cpu+cpu", 1), lambda: ranks, tell=lambda _step: None)
    scorer = prepared.scorer
    whole = scorer.score(sequences)
    states = torch.zeros(ROWS, text_config(scorer.model.config).hidden_size, dtype=scorer.model.dtype)
    scorer.budget.allow(WINDOW)
    return {
        "info": scorer.loaded.info,
        "plan": prepared.plan,
        "layout": scorer.layout,
        "width": scorer.logits_width,
        "logits": str(scorer.head(states).dtype),
        "whole": whole,
        "windows": scorer.score(sequences),
    }


def main(rank: int, meeting: int, asked: Path, out: Path) -> None:
    ranks = meet(torch.device("cpu"), rank, 2, meeting)
    everything = [answers(settings, sequences, ranks) for settings, sequences in pickle.loads(asked.read_bytes())]
    if rank == 0:
        out.write_bytes(pickle.dumps(everything))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
