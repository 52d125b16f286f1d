"""How often guesses were right of late, and whether somebody gets more of them."""

from __future__ import annotations

from typing import Final

HIT_MEMORY: Final = 8
"""Tokens after which a right or wrong guess counts 1/e."""
LEAST_HITS: Final = 0.5
"""Share of right guesses below which a request gets no drafts."""
FIRST_PAUSE: Final = 32
"""Tokens for which a request then gets none, where nothing is known of guesses but by checking them; each time twice as
many."""


class Trust:
    """In guesses for one request that cost something even before they are checked."""

    __slots__ = ("_pause", "_resumes_at", "hits")

    def __init__(self, hits: float) -> None:
        self.hits = max(hits, LEAST_HITS)
        """Share of right guesses of late."""
        self._pause = FIRST_PAUSE
        self._resumes_at = 0

    def lasts(self, num_tokens: int) -> bool:
        """Whether a request with so many tokens of output gets guesses."""
        return num_tokens >= self._resumes_at

    def checked(self, num_guesses: int, num_right: int, num_tokens: int) -> None:
        """Guesses for a request with so many tokens were checked; behind the first wrong one nothing is known."""
        for index in range(min(num_right + 1, num_guesses)):
            self.hits += ((index < num_right) - self.hits) / HIT_MEMORY
        if self.hits < LEAST_HITS:
            self.hits = LEAST_HITS
            self._resumes_at = num_tokens + self._pause
            self._pause *= 2
