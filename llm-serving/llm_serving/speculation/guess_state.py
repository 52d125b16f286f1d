"""What is known of the guesses for one request: how often they are right, and by whom they were made."""

from __future__ import annotations

from typing import Final

from llm_serving.core.choices import Proposer
from llm_serving.speculation.lookup import Lookup
from llm_serving.speculation.trust import HIT_MEMORY, Trust

FIRST_FORCED: Final = 1.0
"""Tokens a step that are expected of what a constraint forces, before it is known."""
FORCED_MEMORY: Final = 8
"""Steps after which what one brought counts 1/e."""
FORCED_FORGOTTEN: Final = 128
"""Tokens after which, where nobody has looked at what is forced, all that was known of it counts 1/e."""


class GuessState:
    """Of one request; belongs to the drafter."""

    __slots__ = (
        "_forced",
        "_forced_at",
        "forced_hits",
        "hits",
        "lookup",
        "num_proposed",
        "num_tokens",
        "proposer",
        "trust",
    )

    def __init__(self, lookup: Lookup, trust: Trust | None) -> None:
        self.lookup = lookup
        self.trust = trust
        """In the draft model; None: there is none."""
        self.hits = 0.0
        """Share of right guesses of late."""
        self.forced_hits = 1.0
        """The same, of what a constraint forces; that is known only of what was checked."""
        self._forced = FIRST_FORCED
        """How many of these a step has brought of late."""
        self._forced_at = 0
        """Tokens of the answer when that was last known."""
        self.num_tokens = 0
        """Tokens of the answer that the look-up has taken."""
        self.num_proposed = 0
        """Of the newest drafts; those behind them are forced."""
        self.proposer = Proposer.NGRAM
        """Whose these are."""

    def forced(self, num_tokens: int) -> float:
        """How many forced tokens are expected of a step, with so many tokens of the answer."""
        known = (1 - 1 / FORCED_FORGOTTEN) ** (num_tokens - self._forced_at)
        return FIRST_FORCED + known * (self._forced - FIRST_FORCED)

    def note_forced(self, num_right: int, num_tokens: int) -> None:
        """A step brought so many."""
        expected = self.forced(num_tokens)
        self._forced = expected + (num_right - expected) / FORCED_MEMORY
        self._forced_at = num_tokens

    def compare(self, output: list[int]) -> bool:
        """Compares the newest tokens with what was guessed, up to the first wrong one; returns whether there still is
        a guess."""
        lookup, hits, num_tokens = self.lookup, self.hits, len(output)
        for index in range(self.num_tokens, num_tokens):
            right = lookup.append(output[index])
            hits += (right - hits) / HIT_MEMORY
            if not right:
                lookup.extend(output[index + 1 :])
                break
        self.hits, self.num_tokens = hits, num_tokens
        return lookup.has_guess

    def look(self, output: list[int]) -> bool:
        """Looks for a guess behind the newest token; returns whether there is one."""
        if num_new := len(output) - self.num_tokens:
            self.lookup.extend(output[-num_new:])
            self.hits *= (1 - 1 / HIT_MEMORY) ** num_new
            self.num_tokens += num_new
        self.lookup.look()
        return self.lookup.has_guess
