"""How far to guess."""

from __future__ import annotations

import pytest
from llm_serving.speculation.step_cost import StepCost
from llm_serving.speculation.worth import MOST_HITS, Chance, Worth, alike, expected


def worth(draft_s: float, max_drafts: int = 16) -> Worth:
    """One row, whose step takes a second; each guess as much longer."""
    cost = StepCost()
    for num_tokens in (1, 5, 9, 17):
        cost.note(num_tokens, 1 + (num_tokens - 1) * draft_s)
    return Worth(cost, 1, 1, max_drafts)


def test_the_last_guess_brings_as_much_as_it_costs() -> None:
    made = worth(0.1)
    for first, further in ((0.9, 0.9), (0.3, 0.8), (0.3, 0.2), (0.5, 0.0), (0.09, 1.0), (1.0, 1.0)):
        reach = made.reach(Chance(first, further))
        brought = [first * min(further, MOST_HITS) ** index for index in range(16)]
        assert reach == sum(each > 0.1 for each in brought), (first, further)


def test_no_further_than_is_allowed_and_nothing_where_guesses_cost_all() -> None:
    assert worth(0.001, 4).reach(alike(1.0)) == 4
    assert worth(1.0).reach(alike(0.9)) == 0
    assert worth(0.1).reach(alike(0.9), proposing_s=0.9) == 0


def test_what_is_expected_is_the_sum_of_chances() -> None:
    assert expected(Chance(0.3, 0.8), 3) == pytest.approx(0.3 + 0.3 * 0.8 + 0.3 * 0.8**2)
    assert expected(Chance(0.3, 0.0), 3) == pytest.approx(0.3)
    assert expected(Chance(0.3, 0.8), 0) == 0
    reach, brought = worth(0.1).looked_up(Chance(0.5, 0.75))
    assert (reach, brought) == (worth(0.1).reach(Chance(0.5, 0.75)), expected(Chance(0.5, 0.75), reach))
