"""What the output of a request must keep to: which tokens may follow those it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llm_serving.core.step import Int32Array


class ConstraintMatcher(Protocol):
    """One output on its way through a constraint; it belongs to one thread at a time."""

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        """The tokens that may come next, as one part of `SamplingInput.allowed_words`; none has a bit when all is lost.

        They follow from the output alone, whatever was asked before, so nothing is to be told when a request is
        preempted or computed again. An output that begins with the one asked about last costs its new tokens only.

        Args:
            output_token_ids: All tokens of the output so far. What ends an output may come only where the constraint is
                fulfilled.
        """

    def allowed_words_after_drafts(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
    ) -> list[Int32Array]:
        """Return `allowed_words` of the output, then of the output with the first draft token, the first two, ..."""

    def constrain_draft(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], count: int) -> list[int]:
        """Return the draft tokens up to the first forbidden one, then the tokens that must follow; at most `count`.

        Where the same text may be written in several tokens, the longest of them is taken to follow.
        """


class Constraint(Protocol):
    """Made ready once, then unchanging; requests share it."""

    def create_matcher(self) -> ConstraintMatcher:
        """A walk for one output."""
