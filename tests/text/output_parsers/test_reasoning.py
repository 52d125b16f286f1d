"""Reasoning is separated from the answer, for any division of the text into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.text.output_parsers.reasoning import ReasoningParser


def split(text: str, cuts: Sequence[int] = (), *, is_open: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(is_open=is_open)
    edges = [0, *sorted(cuts), len(text)]
    parts = [parser.add(text[start:end]) for start, end in pairwise(edges)]
    parts.append(parser.flush())
    return "".join(part.reasoning for part in parts), "".join(part.answer for part in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        ("<think>\nTwo and two.\n</think>\n\nFour.\n", False, "Two and two.", "Four.\n"),
        ("\n<think></think>Four.", False, "", "Four."),
        ("Two and two.\n</think>\n\nFour.", True, "Two and two.", "Four."),
        (" Four. <think>no</think>", False, "", " Four. <think>no</think>"),
        ("<think>first</think> a <think>b</think>", False, "first", "a <think>b</think>"),
        ("<think>never done </thi", False, "never done </thi", ""),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_split_from_the_answer(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    assert split(text, is_open=is_open) == (reasoning, answer)


fragments = st.sampled_from(["<think>", "</think>", "<th", "</thi", "nk>", " ", "\n", "a", "<", "b c", "</"])


@given(text=st.lists(fragments, max_size=16).map("".join), is_open=st.booleans(), data=st.data())
def test_reasoning_split_is_independent_of_text_pieces(text: str, is_open: bool, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=len(text)))
    whole = split(text, is_open=is_open)
    assert split(text, cuts, is_open=is_open) == split(text, range(len(text)), is_open=is_open) == whole


@pytest.mark.parametrize(("begin", "is_open"), [("", False), ("", True), ("<think>", False), ("a", True)])
def test_reasoning_parser_time_is_linear_in_white_space(begin: str, is_open: bool) -> None:
    parser, spaces = ReasoningParser(is_open=is_open), "\n \n"
    told = [parser.add(begin)]
    for _ in range(1000):
        told.append(parser.add(spaces))
        assert len(parser._text) < 10
    told += [parser.add("</think>b"), parser.flush()]
    whole = split(f"{begin}{1000 * spaces}</think>b", is_open=is_open)
    assert ("".join(each.reasoning for each in told), "".join(each.answer for each in told)) == whole
