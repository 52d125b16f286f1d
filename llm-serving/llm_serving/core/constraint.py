"""Constraints on the output of a request (structured output): they determine which tokens may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from llm_serving.core.step import Int32Array


class ConstraintMatcher(Protocol):
    """Determines which tokens a constraint allows in one output. Only one thread may use it at a time."""

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        """Return the bit mask (`AllowedTokens.words`) of the tokens that may follow all tokens of the output so far.

        The result depends only on the output, not on earlier calls. If the output extends the output of the previous
        call, only the new tokens are processed. End tokens are allowed only if the constraint is satisfied. If the
        matcher fails, no bit is set.
        """

    def allowed_words_after_drafts(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
    ) -> list[Int32Array]:
        """Return `allowed_words` for the output, for the output with one draft token, with two, and so on."""

    def constrain_draft(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], count: int) -> list[int]:
        """Return the draft tokens before the first forbidden one, then the tokens that the constraint forces; at most
        `count`.

        If several tokens spell the same forced text, the longest token is used.
        """


class Constraint(Protocol):
    """A compiled constraint. It is immutable, so requests may share it."""

    def create_matcher(self) -> ConstraintMatcher: ...
