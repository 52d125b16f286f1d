"""One output on its way through a grammar, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llm_serving.core.step import Int32Array
from llm_serving.log import get_logger
from llm_serving.text.constraints.grammars import Grammar

logger = get_logger(__name__)

FUEL_TO_BEGIN: Final = 500_000
FUEL_OF_A_STEP: Final = 50_000
MAX_ITEMS_OF_A_STEP: Final = 20_000
"""What llguidance may spend, in its own units: some milliseconds a step."""


def matcher_of(grammar: Grammar, tokens: LLTokenizer, max_states: int) -> LLMatcher:
    """A matcher at the beginning of a grammar; `is_error` tells whether it could be compiled.

    Args:
        grammar: The grammar.
        tokens: From `token_table`.
        max_states: Of the automaton that reads its words.
    """
    limits = LLParserLimits(
        initial_lexer_fuel=FUEL_TO_BEGIN,
        step_lexer_fuel=FUEL_OF_A_STEP,
        step_max_items=MAX_ITEMS_OF_A_STEP,
        max_lexer_states=max_states,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return LLMatcher(tokens, grammar.text, log_level=0, limits=limits)


class TokenWalk:
    """Follows an output through a grammar; see `core.constraint.Walk`.

    Args:
        beginning: At the beginning of the grammar; stays there.
        num_words: Of a mask: enough for a bit a token.
    """

    def __init__(self, beginning: LLMatcher, num_words: int) -> None:
        self._beginning = beginning
        self._matcher: LLMatcher | None = None
        self._taken: list[int] = []
        """The tokens that `_matcher` has behind it."""
        self._num_words = num_words

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        if self._matcher is None or list(output_token_ids[: len(self._taken)]) != self._taken:
            self._matcher, self._taken = self._beginning.deep_copy(), []
        matcher, new = self._matcher, list(output_token_ids[len(self._taken) :])
        self._taken += new
        words = np.zeros(self._num_words, np.int32)
        if not new or matcher.try_consume_tokens(new) == len(new):
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            logger.error("a constraint cannot be kept to any further: %s", matcher.get_error())
            words.fill(0)
        return words
