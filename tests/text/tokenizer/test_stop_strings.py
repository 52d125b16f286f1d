"""Stop strings are found for any division of the text into pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from llm_serving.text.tokenizer.detokenizer import StopStringMatcher


def run(stop, pieces):
    matcher = StopStringMatcher(stop)
    text = ""
    for piece in pieces:
        release = matcher.add(piece)
        text += release.text
        if release.stop is not None:
            return text, release.stop
    return text + matcher.held, None


def first_to_end(text, stop):
    """Slow reference implementation: try every end, then the longest stop string."""
    for end in range(1, len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end - len(candidate)], candidate
    return text, None


def cut(text, borders):
    points = sorted({border for border in borders if border < len(text)} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(points)]


@given(
    text=st.text(alphabet="abc", max_size=40),
    stop=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=4),
    borders=st.lists(st.integers(0, 40)),
)
def test_stop_string_matching_is_independent_of_text_pieces(text, stop, borders):
    assert run(stop, cut(text, borders)) == first_to_end(text, stop)


def test_text_without_a_partial_stop_string_is_released_at_once():
    matcher = StopStringMatcher(["END"])
    assert matcher.add("hello ") == ("hello ", None)
    assert matcher.held == ""


def test_partial_stop_string_is_held_back():
    matcher = StopStringMatcher(["END"])
    assert matcher.add("go E") == ("go ", None)
    assert matcher.add("N") == ("", None)
    assert matcher.add("ERGY E") == ("ENERGY ", None)
    assert matcher.held == "E"
    assert matcher.add("ND more") == ("", "END")


def test_first_complete_stop_string_ends_the_text():
    assert run(["bcd", "c"], ["abcd"]) == ("ab", "c")


def test_stop_string_matching_removes_the_longest_of_those_with_the_same_end():
    assert run(["b", "ab"], ["xab"]) == ("x", "ab")
