"""What is known of the guesses for one request: how often they are right, and by whom they were made."""

from __future__ import annotations

from typing import Final

from llm_serving.core.enums import Proposer
from llm_serving.speculation.lookup import Lookup
from llm_serving.speculation.trust import HIT_MEMORY, Trust
from llm_serving.speculation.worth import Chance

FIRST_CHANCE: Final = 0.3
"""That a guess just found is right, before it is known; of nearly all texts with any place at all it is more."""
FURTHER_CHANCE: Final = 0.8
"""The same of a guess behind one that was right."""
KEPT: Final = 1 - 1 / HIT_MEMORY
"""Of what is known of guesses, behind a token for which there was none."""
FIRST_FORCED: Final = 1.0
"""Tokens a step that are expected of what a constraint forces, before it is known."""
FORCED_MEMORY: Final = 8
"""Steps after which what one brought counts 1/e."""
FORCED_FORGOTTEN: Final = 128
"""Tokens after which, where nobody has looked at what is forced, all that was known of it counts 1/e."""


class GuessState:
    """Of one request; belongs to the drafter."""

    __slots__ = (
        "_first",
        "_forced",
        "_forced_at",
        "_further",
        "_goes_on",
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
        """Share of the newest tokens that were guessed rightly."""
        self._first = FIRST_CHANCE
        self._further = FURTHER_CHANCE
        """Share of right guesses of late behind one that was right; where one was wrong there is none before a look."""
        self._goes_on = False
        """Whether the newest token was guessed rightly."""
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

    @property
    def chance(self) -> Chance:
        """That the next guesses are right: a place just found is often the wrong one, one that was right seldom."""
        return Chance(self._further if self._goes_on else self._first, self._further)

    def hope(self, num_tokens: int) -> float:
        """That there is a right guess behind the newest of so many tokens of the answer: as often as of late, and of
        the first ones as often as of any text."""
        known = max(self.hits, FIRST_CHANCE * KEPT**self.num_tokens)
        return float(known * KEPT ** (num_tokens - self.num_tokens))

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
        lookup, hits, goes_on, num_tokens = self.lookup, self.hits, self._goes_on, len(output)
        for index in range(self.num_tokens, num_tokens):
            right = lookup.append(output[index])
            hits += (right - hits) / HIT_MEMORY
            if goes_on:
                self._further += (right - self._further) / HIT_MEMORY
            else:
                self._first += (right - self._first) / HIT_MEMORY
            goes_on = right
            if not lookup.has_guess:
                lookup.extend(output[index + 1 :])
                break
        self.hits, self._goes_on, self.num_tokens = hits, goes_on, num_tokens
        return lookup.has_guess

    def look(self, output: list[int]) -> bool:
        """Looks for a guess behind the newest token; returns whether there is one."""
        if num_new := len(output) - self.num_tokens:
            self.lookup.extend(output[-num_new:])
            self.hits *= KEPT**num_new
            self.num_tokens += num_new
        self._goes_on = False
        self.lookup.look()
        return self.lookup.has_guess
