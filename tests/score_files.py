"""Files of rows for `logprobd score`, and a run of it in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson

from logprobd.offline.score import Summary, run
from logprobd.offline.settings import ScoreSettings

VOCAB = 211  # of the tiny model


def random_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of ids, each prompt about three times and not side by side; some completions are empty."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCAB, random.integers(1, 30)).tolist() for _ in range(max(1, count // 3))]
    return [
        {
            "id": number,
            "prompt": prompts[random.integers(len(prompts))],
            "completion": random.integers(0, VOCAB, random.integers(0, 12)).tolist(),
        }
        for number in range(count)
    ]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def score(given: Path, out: Path, **options: Any) -> Summary:
    return run(ScoreSettings(**options), given, out)
