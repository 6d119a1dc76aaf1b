"""How many tokens one forward pass may have, learnt from running out of memory."""

from dataclasses import dataclass

UNBOUNDED = 1 << 40
SMALLEST_PASS = 16  # tokens; the model's rows come in multiples of 16 anyway
BATCHES_BEFORE_GROWING = 32  # memory that another process took for a while is found again


@dataclass(slots=True)
class PassBudget:
    """The tokens of one forward pass: halved when memory runs out, doubled again after calm batches.

    `most` is what the memory plan allows.
    """

    most: int = UNBOUNDED
    tokens: int = UNBOUNDED
    halvings: int = 0
    _calm: int = 0

    def allow(self, most: int) -> None:
        """Set what the memory plan allows."""
        self.most = self.tokens = max(SMALLEST_PASS, most)

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
