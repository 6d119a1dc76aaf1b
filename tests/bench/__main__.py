"""All benchmarks: `.venv/bin/python tests/bench NAME`, each documented in the module of its name.

Results are JSON lines on standard output and a table on standard error; `--out FOLDER` keeps both.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parents[1] / "clients"))

from logprobd.own_process import REPRODUCIBLE_MKL  # noqa: E402 - found through the path above

NAMES = ("seed", "trainer", "growth", "precision", "longest", "packing", "exactness", "encoding", "event_loop")


def main() -> None:
    os.environ.update(REPRODUCIBLE_MKL | os.environ)  # as in a worker, and before MKL computes anything
    parser = argparse.ArgumentParser(prog="tests/bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for name in NAMES:
        module = importlib.import_module(f"bench.{name}")
        command = commands.add_parser(name, description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter)
        command.add_argument("--out", type=Path, help="folder for NAME.jsonl, NAME.md and plots")
        module.add_options(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
