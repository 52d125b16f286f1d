"""Matches one output against a grammar, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
"""This limit and the two above are in llguidance's units. Those of a step amount to a few milliseconds."""
MAX_ONLY: Final = 16
"""Maximum number of allowed tokens that `_only_one` compares. If there are more, it assumes a choice."""


def matcher_of(grammar: Grammar, tokens: LLTokenizer, max_states: int) -> LLMatcher:
    """Return a matcher at the start of a grammar. `is_error` is set if the grammar could not be compiled."""
    limits = LLParserLimits(
        initial_lexer_fuel=FUEL_TO_BEGIN,
        step_lexer_fuel=FUEL_OF_A_STEP,
        step_max_items=MAX_ITEMS_OF_A_STEP,
        max_lexer_states=max_states,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return LLMatcher(tokens, grammar.text, log_level=0, limits=limits)


@dataclass(unsafe_hash=True)
class TokenConstraint:
    """A grammar compiled for one tokenizer. `compile_grammar()` returns a matcher at the grammar's start. `end_ids`:
    ids of the tokens that end an output.
    """

    grammar: Grammar
    compile_grammar: Callable[[], LLMatcher] = field(compare=False, repr=False)
    token_bytes: Sequence[bytes] = field(compare=False, repr=False)
    end_ids: frozenset[int] = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Compile the grammar again, because all copies of a matcher share one limit on cached lexer states."""
        self._start = self.compile_grammar()

    @property
    def error(self) -> str:
        """Why the grammar could not be compiled, or "" if it was compiled."""
        return str(self._start.get_error()) if self._start.is_error() else ""

    @property
    def ignored(self) -> list[str]:
        """Descriptions of the constraints that are not enforced, because the schema is lenient (see `json_grammar`)."""
        return list(self._start.get_grammar_warnings())

    def copy_of_start(self) -> LLMatcher:
        return self._start.deep_copy()

    def create_matcher(self) -> TokenMatcher:
        return TokenMatcher(self)


class TokenMatcher:
    """Matches an output against a grammar. Implements `core.request.ConstraintMatcher`. If the outputs of other
    requests have used up the limit on lexer states, the grammar is compiled again.
    """

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint
        self._begin()

    def _begin(self) -> None:
        self._matcher = self._constraint.copy_of_start()
        self._taken: list[int] = []
        self._num_queried = 0
        self._words: Int32Array | None = None

    def allowed_words(self, output_token_ids: Sequence[int]) -> Int32Array:
        return self.allowed_words_after_drafts(output_token_ids, ())[0]

    def allowed_words_after_drafts(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int]
    ) -> list[Int32Array]:
        masks = self._masks(output_token_ids, draft_token_ids)
        if self._matcher.is_error():
            self._constraint.restart()
            self._begin()
            masks = self._masks(output_token_ids, draft_token_ids)
            if self._matcher.is_error():
                error = self._matcher.get_error()
                logger.error(
                    "structured output: the grammar matcher of a request failed, so its answer ends: error=%s", error
                )
        return masks

    def _masks(self, output: Sequence[int], draft_token_ids: Sequence[int]) -> list[Int32Array]:
        masks = [self._words_behind(output)]
        matches = True
        for draft_token in draft_token_ids:
            matches = matches and self._take([draft_token])
            masks.append(self._mask() if matches else self._no_words())
        return masks

    def constrain_draft(self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], count: int) -> list[int]:
        words = self._words_behind(output_token_ids)
        if not words.any():
            return []
        found = list(draft_token_ids[: self._matcher.validate_tokens(list(draft_token_ids))])[:count]
        matches = self._take(found)
        while matches and len(found) < count and not (found and found[-1] in self._constraint.end_ids):
            token_id = self._only_one(self._mask() if found else words)
            if token_id is None:
                break
            found.append(token_id)
            matches = self._take([token_id])
        return found

    def _words_behind(self, output: Sequence[int]) -> Int32Array:
        """Advance to the end of an output. Return the bit mask of the tokens that may follow it."""
        matches = self._go_to(output)
        if self._words is None:
            self._words = self._mask() if matches else self._no_words()
        return self._words

    def _go_to(self, output: Sequence[int]) -> bool:
        num_same = self._num_same(output)
        if num_same < len(output) or len(output) != self._num_queried:
            self._words = None
        num_behind = len(self._taken) - num_same
        if self._matcher.is_error() or (num_behind and not self._matcher.rollback(num_behind)):
            self._matcher, self._taken, self._words = self._constraint.copy_of_start(), [], None
        del self._taken[num_same:]
        self._num_queried = len(output)
        return self._take(list(output[len(self._taken) :]))

    def _num_same(self, output: Sequence[int]) -> int:
        taken, start = self._taken, self._num_queried
        if list(output[:start]) != taken[:start]:
            start = 0
        same = takewhile(lambda pair: pair[0] == pair[1], zip(output[start:], taken[start:], strict=False))
        return min(start + sum(1 for _ in same), len(output))

    def _take(self, token_ids: list[int]) -> bool:
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
        return np.zeros(-(-len(self._constraint.token_bytes) // 32), np.int32)

    def _only_one(self, words: Int32Array) -> int | None:
        """Return the only allowed token, or the longest if all others are its prefixes. Return None otherwise."""
        indices = np.flatnonzero(words)
        if not 0 < len(indices) <= MAX_ONLY:
            return None
        bits = np.unpackbits(words[indices].view(np.uint8), bitorder="little").reshape(-1, 32)
        token_ids: list[int] = (32 * indices[np.nonzero(bits)[0]] + np.nonzero(bits)[1]).tolist()
        if len(token_ids) > MAX_ONLY or (len(token_ids) > 1 and not self._constraint.end_ids.isdisjoint(token_ids)):
            return None
        # Of equal texts take the last id, because tokens of single bytes come first.
        token_bytes = self._constraint.token_bytes
        text, token_id = max((token_bytes[each], each) for each in token_ids)
        return token_id if all(text.startswith(token_bytes[each]) for each in token_ids) else None
