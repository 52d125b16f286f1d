"""What is left of a step that has run for a while."""

from __future__ import annotations

import pytest
from llm_serving.admission.overruns import MEMORY, MIN_STEPS, MOST, Overruns, remaining


def fed(*times: float) -> Overruns:
    overruns = Overruns()
    for seconds in times:
        overruns.add(2 * seconds, 2.0)
    return overruns


def test_what_is_left_is_what_those_had_left_that_ran_as_long() -> None:
    ascending = fed(*[0.5, 0.5, 0.5, 2.5] * MIN_STEPS).ascending
    for elapsed, left in ((0.0, 1.0), (0.25, 0.75), (0.5, 2.0), (1.0, 1.5), (2.4, 0.1), (2.5, 0.0), (9.0, 0.0)):
        assert remaining(ascending, elapsed) == pytest.approx(left)


def test_before_enough_was_seen_a_step_takes_what_is_expected() -> None:
    ascending = fed(*[3.0] * (MIN_STEPS - 1)).ascending
    assert [remaining(ascending, elapsed) for elapsed in (0.0, 0.75, 2.0)] == [1.0, 0.25, 0.0]


def test_the_newest_count_and_what_was_told_before_stays_as_it_was() -> None:
    overruns = fed(*[3.0] * MEMORY)
    before = overruns.ascending
    for _ in range(MEMORY):
        overruns.add(1.0, 1.0)
    assert list(before) == [3.0] * MEMORY
    assert list(overruns.ascending) == [1.0] * MEMORY


def test_a_step_of_which_nothing_was_expected_teaches_nothing() -> None:
    overruns = fed(1.0)
    overruns.add(1.0, 0.0)
    assert list(overruns.ascending) == [1.0]


def test_a_step_that_was_held_up_makes_no_other_longer() -> None:
    ascending = fed(*[1.0] * MIN_STEPS, 1000.0).ascending
    assert remaining(ascending, 0.0) < 1.1
    assert remaining(ascending, 1.5) == MOST - 1.5
