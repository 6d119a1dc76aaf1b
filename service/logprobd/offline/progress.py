"""The progress bar on stderr: part done, time taken and left, and the rate."""

import sys
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm


class Progress:
    """Counts by weight, which is known before anything is tokenized; the rate is that of the tokens of this run."""

    def __init__(self, weight: int, done: int) -> None:
        self._tokens = 0
        self._bar: Any = tqdm(
            total=weight,
            initial=done,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
            bar_format="{percentage:3.0f}% |{bar}| {elapsed} < {remaining}{postfix}",
        )
        self._lines = logging_redirect_tqdm()  # log lines go above the bar, not into it

    def __enter__(self) -> Self:
        self._lines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        self._lines.__exit__(kind, error, traceback)

    def advance(self, weight: int, tokens: int) -> None:
        """Show a batch as done."""
        self._tokens += tokens
        seconds = max(self._bar.format_dict["elapsed"], 1e-3)
        self._bar.set_postfix_str(f"{self._tokens / seconds:,.0f} tokens/s", refresh=False)
        self._bar.update(weight)
