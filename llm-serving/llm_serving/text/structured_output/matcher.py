"""One output on its way through a grammar, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from llm_serving.core.step import Int32Array
from llm_serving.log import get_logger
from llm_serving.text.structured_output.grammars import Grammar

logger = get_logger(__name__)

FUEL_TO_BEGIN: Final = 500_000
FUEL_OF_A_STEP: Final = 50_000
MAX_ITEMS_OF_A_STEP: Final = 20_000
"""What llguidance may spend, in its own units: some milliseconds a step."""
MAX_ONLY: Final = 16
"""Tokens in which one text may begin, for it to be seen that no other text can come."""


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


class TokenMatcher:
    """Follows an output through a grammar; see `core.constraint.ConstraintMatcher`.

    Args:
        beginning: At the beginning of the grammar; stays there.
        token_bytes: Text of each token that can be chosen.
        end_ids: Ids that end an output.
        begin_anew: Another matcher at the beginning. Copies of one count the states of their automaton together, so
            that one that cannot go on may only have met what other outputs took.
    """

    def __init__(
        self,
        beginning: LLMatcher,
        token_bytes: Sequence[bytes],
        end_ids: frozenset[int],
        begin_anew: Callable[[], LLMatcher],
    ) -> None:
        self._beginning = beginning
        self._begin_anew = begin_anew
        self._token_bytes = token_bytes
        self._end_ids = end_ids
        self._matcher = beginning.deep_copy()
        self._taken: list[int] = []
        """The tokens that `_matcher` has behind it."""
        self._num_asked = 0
        """Tokens of the output that was asked about last; the rest of `_taken` are draft tokens."""
        self._words: Int32Array | None = None
        """What may follow that output, once it has been computed."""

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        return self.allowed_words_after_drafts(output_token_ids, ())[0]

    def allowed_words_after_drafts(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
    ) -> list[Int32Array]:
        parts = self._parts(output_token_ids, draft_token_ids)
        if self._matcher.is_error():
            self._renew()
            parts = self._parts(output_token_ids, draft_token_ids)
            if self._matcher.is_error():
                logger.error("a constraint cannot be kept to any further: %s", self._matcher.get_error())
        return parts

    def _parts(self, output: Sequence[int], draft_token_ids: Sequence[int]) -> list[Int32Array]:
        parts = [self._words_behind(output)]
        keeps = True
        for draft_token in draft_token_ids:
            keeps = keeps and self._take([draft_token])
            parts.append(self._mask() if keeps else self._no_words())
        return parts

    def _renew(self) -> None:
        self._beginning = self._begin_anew()
        self._matcher, self._taken, self._num_asked, self._words = self._beginning.deep_copy(), [], 0, None

    def constrain_draft(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], count: int) -> list[int]:
        words = self._words_behind(output_token_ids)
        if not words.any():
            return []
        found = list(draft_token_ids[: self._matcher.validate_tokens(list(draft_token_ids))])[:count]
        keeps = self._take(found)
        while keeps and len(found) < count and not (found and found[-1] in self._end_ids):
            token_id = self._only_one(self._mask() if found else words)
            if token_id is None:
                break
            found.append(token_id)
            keeps = self._take([token_id])
        return found

    def _words_behind(self, output: Sequence[int]) -> Int32Array:
        """Goes to the end of an output and tells what may follow it."""
        keeps = self._go_to(output)
        if self._words is None:
            self._words = self._mask() if keeps else self._no_words()
        return self._words

    def _go_to(self, output: Sequence[int]) -> bool:
        """Whether there is a way."""
        num_same = self._num_same(output)
        if num_same < len(output) or len(output) != self._num_asked:
            self._words = None
        num_behind = len(self._taken) - num_same
        if self._matcher.is_error() or (num_behind and not self._matcher.rollback(num_behind)):
            self._matcher, self._taken, self._words = self._beginning.deep_copy(), [], None
        del self._taken[num_same:]
        self._num_asked = len(output)
        return self._take(list(output[len(self._taken) :]))

    def _num_same(self, output: Sequence[int]) -> int:
        """How far an output is what has been taken."""
        taken, start = self._taken, self._num_asked
        if list(output[:start]) != taken[:start]:
            start = 0
        same = takewhile(lambda pair: pair[0] == pair[1], zip(output[start:], taken[start:], strict=False))
        return min(start + sum(1 for _ in same), len(output))

    def _take(self, token_ids: list[int]) -> bool:
        """Whether all of them may come, one after the other."""
        if not token_ids:
            return True
        num_taken = self._matcher.try_consume_tokens(token_ids)
        self._taken += token_ids[:num_taken]
        return num_taken == len(token_ids)

    def _mask(self) -> Int32Array:
        words = self._no_words()
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(0)
        return words

    def _no_words(self) -> Int32Array:
        return np.zeros(-(-len(self._token_bytes) // 32), np.int32)

    def _only_one(self, words: Int32Array) -> int | None:
        """The token that must come, or the longest where all are beginnings of it; None where there is a choice."""
        places = np.flatnonzero(words)
        if not 0 < len(places) <= MAX_ONLY:
            return None
        bits = np.unpackbits(words[places].view(np.uint8), bitorder="little").reshape(-1, 32)
        token_ids: list[int] = (32 * places[np.nonzero(bits)[0]] + np.nonzero(bits)[1]).tolist()
        if len(token_ids) > MAX_ONLY or (len(token_ids) > 1 and not self._end_ids.isdisjoint(token_ids)):
            return None
        # Among equals the last: tokens of single bytes come first.
        text, token_id = max((self._token_bytes[each], each) for each in token_ids)
        return token_id if all(text.startswith(self._token_bytes[each]) for each in token_ids) else None
