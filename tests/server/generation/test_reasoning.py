"""Counting of reasoning tokens."""

from __future__ import annotations

import pytest
from llm_serving.server.generation.tools import ReasoningTokenCounter

OPENING, CLOSING = 7, 8


@pytest.mark.parametrize(
    ("token_ids", "is_open", "count"),
    [
        ([OPENING, 1, 2, 3, CLOSING, 4], False, 3),
        ([1, 2, CLOSING, 4, 5], True, 2),
        ([9, OPENING, 1, CLOSING, 4, OPENING, 5, CLOSING], False, 1),  # one thought an answer, at its beginning
        ([OPENING, CLOSING, 4], False, 0),
        ([OPENING, 1, 2], False, 2),
        ([1, 2, 3], False, 0),
    ],
)
def test_reasoning_tokens_are_counted_for_any_text_pieces(token_ids, is_open, count):
    for size in range(1, len(token_ids) + 1):
        counter = ReasoningTokenCounter([OPENING], CLOSING, is_open=is_open)
        for begin in range(0, len(token_ids), size):
            counter.add(token_ids[begin : begin + size])
        assert counter.num_tokens == count


def test_reasoning_tokens_are_counted_in_several_parts():
    opening = [7, 1, 9]
    for size in range(1, 20):
        counter = ReasoningTokenCounter(opening, CLOSING, is_open=False, reopens=True)
        token_ids = [*opening, 4, 5, CLOSING, 7, 7, 1, 9, 6, CLOSING, 7, 2, 9, 6, CLOSING]
        for begin in range(0, len(token_ids), size):
            counter.add(token_ids[begin : begin + size])
        assert counter.num_tokens == 3
