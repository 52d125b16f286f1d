"""How often guesses of one request are right: just found, and behind one that was right."""

from __future__ import annotations

import pytest
from llm_serving.speculation.finished_answers import FinishedAnswers
from llm_serving.speculation.guess_state import FIRST_CHANCE, FURTHER_CHANCE, GuessState
from llm_serving.speculation.lookup import Lookup
from llm_serving.speculation.trust import HIT_MEMORY
from llm_serving.speculation.worth import Chance

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


def state(prompt=PROMPT) -> GuessState:
    made = GuessState(Lookup(prompt, "", 2, FinishedAnswers(2, 100)), None)
    assert made.look([])
    return made


def towards(share: float, right: bool) -> float:
    return share + (right - share) / HIT_MEMORY


def test_a_place_just_found_and_one_that_was_right_are_told_apart() -> None:
    made = state()
    assert made.chance == Chance(FIRST_CHANCE, FURTHER_CHANCE)
    assert made.compare([3])
    assert made.chance == Chance(FURTHER_CHANCE, FURTHER_CHANCE)
    assert made.compare([3, 4])
    further = towards(FURTHER_CHANCE, True)
    assert made.chance == Chance(further, further)
    assert not made.compare([3, 4, 9])
    assert made.chance == Chance(towards(FIRST_CHANCE, True), towards(further, False))


def test_a_first_guess_that_is_wrong_says_nothing_of_those_behind_it() -> None:
    made = state()
    assert not made.compare([9])
    assert made.chance == Chance(towards(FIRST_CHANCE, False), FURTHER_CHANCE)


def test_behind_a_look_a_place_is_new() -> None:
    made = state([*PROMPT, 3, 4, 5, 1, 2])
    made.compare([3, 4, 5])
    assert made.look([3, 4, 5, 1, 2])
    assert made.chance.first == pytest.approx(towards(FIRST_CHANCE, True))


def test_tokens_that_nobody_guessed_are_no_wrong_guesses() -> None:
    """A place at the end of a text has told the truth until there."""
    finished = FinishedAnswers(2, 100)
    finished.add([("", (1, 2, 3, 4))])
    made = GuessState(Lookup([1, 2], "", 2, finished), None)
    assert made.look([])
    assert not made.compare([3, 4, 500, 501])
    assert made.chance.further == towards(FURTHER_CHANCE, True)
    made.look([3, 4, 500, 501])
    assert made.chance == Chance(towards(FIRST_CHANCE, True), towards(FURTHER_CHANCE, True))
