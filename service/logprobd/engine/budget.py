"""How many tokens one forward pass may have, learnt from running out of memory."""

from collections.abc import Callable
from dataclasses import dataclass, field

UNBOUNDED = 1 << 40
SMALLEST_PASS = 16  # tokens; the model's rows come in multiples of 16 anyway
BATCHES_BEFORE_GROWING = 32  # memory that another process took for a while is found again


@dataclass(slots=True)
class PassBudget:
    """The tokens of one forward pass: halved when memory runs out, doubled again after calm batches.

    `most` is what the memory plan allows a pass without a cache, `window` the same beside the cached keys of a
    path of so many tokens.
    """

    most: int = UNBOUNDED
    tokens: int = UNBOUNDED
    halvings: int = 0
    window: Callable[[int], int] = field(default=lambda _longest: UNBOUNDED)
    _calm: int = 0

    def allow(self, most: int, window: Callable[[int], int] = lambda _longest: UNBOUNDED) -> None:
        """Set what the memory plan allows."""
        self.most = self.tokens = max(SMALLEST_PASS, most)
        self.window = window

    def pass_tokens(self, total: int, longest: int) -> int:
        """The tokens of a pass over `total` tokens with paths up to `longest`: all, or those of a window."""
        return total if total <= self.tokens else max(SMALLEST_PASS, min(self.tokens, self.window(longest)))

    def halve(self, used: int) -> bool:
        """Learn that a batch of `used` tokens did not fit; false if passes cannot be smaller."""
        tried = min(used, self.tokens)
        if tried <= SMALLEST_PASS:
            return False
        self.tokens = max(SMALLEST_PASS, tried // 2)
        self.halvings += 1
        self._calm = 0
        return True

    def held(self) -> None:
        """Learn that a batch fitted."""
        if self.tokens < self.most:
            self._calm += 1
            if self._calm >= BATCHES_BEFORE_GROWING:
                self.tokens, self._calm = min(self.most, 2 * self.tokens), 0
