"""Constraints on the output of a request (structured output), which determine the tokens that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llm_serving.core.step import Int32Array


class ConstraintMatcher(Protocol):
    """Follows one output through a constraint. Only one thread uses it at a time."""

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        """Return the bit mask (`AllowedTokens.words`) of the tokens that may follow all tokens of the output so far.

        It depends only on the output, not on earlier calls. A call that extends the last output costs only its new
        tokens. End tokens are allowed only if the constraint is satisfied. If the matcher fails, no bit is set.
        """

    def allowed_words_after_drafts(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
    ) -> list[Int32Array]:
        """Return `allowed_words` for the output, then for the output plus the first draft token, the first two, ..."""

    def constrain_draft(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], count: int) -> list[int]:
        """Return the draft tokens up to the first forbidden one, then the tokens that must follow; at most `count`. If
        several tokens can spell the same text, the longest one is used.
        """


class Constraint(Protocol):
    """A compiled constraint. Immutable and shared by requests."""

    def create_matcher(self) -> ConstraintMatcher:
        """Return a matcher for one output."""
