"""What the output of a request must keep to: which tokens may follow those it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llm_serving.core.step import Int32Array


class Walk(Protocol):
    """One output on its way through a constraint; it belongs to one thread at a time."""

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        """The tokens that may come next, as one part of `SamplingInput.allowed_words`; none has a bit when all is lost.

        They follow from the output alone, whatever was asked before, so nothing is to be told when a request is
        preempted or computed again. An output that begins with the one asked about last costs its new tokens only.

        Args:
            output_token_ids: All tokens of the output so far. What ends an output may come only where the constraint is
                fulfilled.
        """

    def allowed_behind(self, output_token_ids: Sequence[int], guesses: Sequence[int]) -> list[Int32Array]:
        """`allowed_words` of the output, then of it with the first guess at its end, with the first two, and so on."""

    def possible(self, output_token_ids: Sequence[int], guesses: Sequence[int], count: int) -> list[int]:
        """What can come next: the guesses up to the first that may not, then what must follow; `count` at most.

        Where the same text may be written in several tokens, the longest of them is taken to follow.
        """


class Constraint(Protocol):
    """Made ready once, then unchanging; requests share it."""

    def begin(self) -> Walk:
        """A walk for one output."""
