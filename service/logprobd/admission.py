"""How many tokens may wait at once, and when whoever is refused should come back."""

import math
import time

from logprobd.errors import ApiError


class Admission:
    """Tokens that were admitted and are not yet answered, under a limit."""

    def __init__(self, max_queued_tokens: int) -> None:
        self.max_queued_tokens = max_queued_tokens
        self.tokens = 0
        self._tokens_per_second = 1000.0  # a guess until the first batch is measured
        self._answered_at = 0.0

    def take(self, tokens: int) -> None:
        """Admit a request; raises ApiError if it never fits, or not now."""
        if tokens > self.max_queued_tokens:
            raise ApiError(
                "request_too_large",
                f"the request has {tokens} tokens; the limit is {self.max_queued_tokens}; send it in parts",
            )
        if self.tokens + tokens > self.max_queued_tokens:
            raise ApiError(
                "overloaded",
                f"{self.tokens} tokens are queued; with the request's {tokens} that is more than "
                f"{self.max_queued_tokens}",
                retry_after=max(1, math.ceil(self.tokens / self._tokens_per_second)),
            )
        self.tokens += tokens

    def measure(self, tokens: int, started: float) -> float:
        """The seconds of a batch, which did not run until the one before had; they make the speed for Retry-After."""
        now = time.perf_counter()
        seconds, self._answered_at = now - max(started, self._answered_at), now
        self._tokens_per_second = 0.8 * self._tokens_per_second + 0.2 * tokens / max(seconds, 1e-3)
        return seconds
