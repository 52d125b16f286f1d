"""What one more token costs, learnt from steps."""

from __future__ import annotations

import pytest
from llm_serving.speculation.step_cost import StepCost


def test_a_line_is_found() -> None:
    cost = StepCost()
    for num_tokens in (1, 4, 9, 2):
        cost.note(num_tokens, 0.010 + 0.001 * num_tokens)
    assert cost.seconds_a_token == pytest.approx(0.001)
    assert cost.seconds_of(20) == pytest.approx(0.030)


def test_steps_that_are_alike_say_nothing_of_the_slope() -> None:
    cost = StepCost()
    assert (cost.seconds_of(3), cost.seconds_a_token) == (0.0, 0.0)
    for _ in range(1000):
        cost.note(3, 0.02)
    assert cost.seconds_a_token == 0.0
    assert cost.seconds_of(9) == pytest.approx(0.02)


def test_more_tokens_never_save_time() -> None:
    cost = StepCost()
    cost.note(1, 0.03)
    cost.note(9, 0.01)
    assert cost.seconds_a_token == 0.0


def test_what_was_is_forgotten() -> None:
    cost = StepCost()
    for _ in range(2000):
        cost.note(1, 0.1)
        cost.note(2, 0.2)
    for _ in range(4000):
        cost.note(1, 0.01)
        cost.note(2, 0.01)
    assert cost.seconds_a_token == pytest.approx(0.0, abs=1e-6)
