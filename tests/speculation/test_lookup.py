"""Looking up what followed the same tokens before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.speculation.lookup import Lookup


def lookup(prompt, finished=None, namespace="", length=2):
    look = Lookup(prompt, namespace, length, finished or FinishedAnswers(length, 100))
    look.look()
    return look


def say(look, token_ids) -> None:
    for token_id in token_ids:
        look.append(token_id)
        if not look.has_guess:
            look.look()


def test_what_followed_in_the_prompt_is_guessed() -> None:
    look = lookup([1, 2, 3, 4, 5, 1, 2])
    assert look.guess(3) == [3, 4, 5]
    assert look.guess(9) == [3, 4, 5, 1, 2, 3, 4, 5, 1]  # and so on


def test_nothing_is_guessed_where_nothing_was_seen() -> None:
    look = lookup([1, 2, 3])
    assert not look.has_guess
    assert look.guess(3) == []
    assert not look.append(4)


def test_a_place_is_followed_as_long_as_it_is_right() -> None:
    look = lookup([1, 2, 3, 4, 5, 1, 2])
    assert look.append(3)
    assert look.guess(2) == [4, 5]
    assert not look.append(9)
    assert look.guess(2) == []


def test_a_run_is_guessed_to_go_on() -> None:
    look = lookup([5, 5])
    say(look, [5] * 6)
    assert look.guess(9) == [5] * 9


def test_a_prompt_shorter_than_what_must_stand_in_a_row() -> None:
    look = lookup([1], length=3)
    say(look, (2, 3, 4, 1, 2, 3))
    assert look.guess(2) == [4, 1]


def test_the_newest_place_counts() -> None:
    assert lookup([1, 2, 3, 1, 2, 4, 1, 2]).guess(1) == [4]


def test_the_answer_itself_is_looked_in() -> None:
    look = lookup([9, 9])
    say(look, (1, 2, 3, 1, 2))
    assert look.guess(2) == [3, 1]


def test_a_place_at_the_end_is_looked_up_again() -> None:
    finished = FinishedAnswers(2, 100)
    finished.add([("", (1, 2, 3))])
    look = lookup([1, 2], finished)
    assert look.append(3)
    assert look.guess(4) == []


def test_finished_answers_are_seen_in_their_namespace_alone() -> None:
    finished = FinishedAnswers(2, 100)
    finished.add([("mine", (1, 2, 3, 4))])
    assert lookup([1, 2], finished, "mine").guess(4) == [3, 4]
    assert lookup([1, 2], finished, "yours").guess(4) == []


def test_the_longest_that_stood_before_counts() -> None:
    finished = FinishedAnswers(2, 100)
    finished.add([("", (1, 2, 3, 4, 5, 6)), ("", (3, 4, 7, 8))])
    assert lookup([3, 4], finished).guess(2) == [7, 8]  # the newest that is as long
    assert lookup([1, 2, 3, 4], finished).guess(2) == [5, 6]  # four tokens before two
    assert lookup([3, 4, 9, 3, 4], finished).guess(2) == [
        9,
        3,
    ]  # two of the text itself before two of others
    assert lookup([3, 4, 9, 1, 2, 3, 4], finished).guess(2) == [5, 6]


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    answer=st.lists(st.integers(0, 5), max_size=40),
    data=st.data(),
)
def test_after_several_tokens_the_same_is_guessed_as_of_a_longer_prompt(prompt, answer, data) -> None:
    finished = FinishedAnswers(2, 100)
    finished.add([("", tuple(data.draw(st.lists(st.integers(0, 5), max_size=12))))])
    look = lookup(prompt, finished)
    while answer:
        piece, answer = (
            answer[: (count := data.draw(st.integers(1, 8)))],
            answer[count:],
        )
        if data.draw(st.booleans()):
            look.extend(piece)
        else:
            for token_id in piece:
                look.append(token_id)
        prompt += piece
        other = lookup(prompt, finished)
        assert look._tokens == other._tokens
        if data.draw(st.booleans()):
            continue
        look.look()
        assert look.guess(5) == other.guess(5)
        assert (look._places, look._ngram) == (other._places, other._ngram)
