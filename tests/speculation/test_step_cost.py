"""What further tokens cost, learnt from steps."""

from __future__ import annotations

import random

import pytest
from llm_serving.speculation.step_cost import StepCost


def test_a_line_is_found() -> None:
    cost = StepCost()
    for num_tokens in (1, 4, 9, 2):
        cost.note(num_tokens, 0.010 + 0.001 * num_tokens)
    assert cost.further(2, 1) == pytest.approx(0.001)
    assert cost.further(2, 30) == pytest.approx(0.030)
    assert cost.seconds_of(20) == pytest.approx(0.030)


def test_steps_that_are_alike_say_nothing_of_what_more_tokens_cost() -> None:
    cost = StepCost()
    assert (cost.seconds_of(3), cost.further(3, 1)) == (0.0, 0.0)
    for _ in range(1000):
        cost.note(3, 0.02)
    assert cost.further(3, 1) == cost.further(3, 40) == 0.0
    assert cost.seconds_of(9) == pytest.approx(0.02)


def test_more_tokens_never_save_time() -> None:
    cost = StepCost()
    cost.note(1, 0.03)
    cost.note(9, 0.01)
    assert cost.further(1, 8) == 0.0


def test_more_tokens_never_cost_more_than_as_many_steps() -> None:
    cost = StepCost()
    cost.note(100, 0.01)
    cost.note(101, 0.05)  # one of them was put off
    assert cost.further(100, 10) == pytest.approx(cost.seconds_of(100) / 10)


def seconds(num_tokens: int, context: int = 0) -> float:
    """As long as memory is the limit a step takes as long with one token as with 32."""
    return 0.010 * max(1.0, num_tokens / 32) + 1e-7 * context * num_tokens


def test_where_arithmetic_takes_over_from_memory_tokens_begin_to_cost() -> None:
    rng, cost = random.Random(0), StepCost()
    for _ in range(200):
        for fewest, most in ((1, 9), (96, 160)):  # one stream and 128, each with guesses
            num_tokens = rng.randint(fewest, most)
            cost.note(num_tokens, seconds(num_tokens) * rng.uniform(0.95, 1.05))
    assert cost.seconds_of(1) == pytest.approx(0.010, rel=0.03)
    assert cost.further(1, 8) < 0.0004
    assert cost.seconds_of(128) == pytest.approx(0.040, rel=0.03)
    assert cost.further(128, 64) == pytest.approx(0.020, rel=0.1)


def test_tokens_on_both_sides_of_where_they_begin_to_cost() -> None:
    rng, cost = random.Random(0), StepCost()
    for _ in range(400):
        num_tokens = 8 * rng.randint(1, 9)
        cost.note(num_tokens, seconds(num_tokens) * rng.uniform(0.95, 1.05))
    assert cost.further(8, 8) < 0.001
    assert cost.further(8, 64) == pytest.approx(0.0125, rel=0.15)
    assert cost.further(48, 16) == pytest.approx(0.005, rel=0.25)


def test_steps_that_grow_longer_with_what_has_been_said() -> None:
    rng, cost = random.Random(0), StepCost()
    for index in range(4000):
        num_tokens = 32 + (8 * rng.randint(1, 8) if index % 8 == 0 else 0)
        cost.note(num_tokens, seconds(num_tokens, context=4 * index))
    assert cost.seconds_of(32) == pytest.approx(seconds(32, 16000), rel=0.1)
    assert cost.further(32, 32) == pytest.approx(seconds(64, 16000) - seconds(32, 16000), rel=0.2)


def test_what_was_is_forgotten() -> None:
    cost = StepCost()
    for _ in range(2000):
        cost.note(1, 0.1)
        cost.note(2, 0.2)
    for _ in range(4000):
        cost.note(1, 0.01)
        cost.note(2, 0.01)
    assert cost.further(1, 1) == pytest.approx(0.0, abs=1e-6)


def test_what_has_not_been_tried_for_long_is_tried_again() -> None:
    cost = StepCost()
    for num_tokens in (100, 128, 140):
        cost.note(num_tokens, seconds(num_tokens))
    for _ in range(100):
        cost.note(128, seconds(128))
    assert cost.further(128, 12) > 0.003
    for _ in range(4000):
        cost.note(128, 0.1)  # long contexts
    assert cost.further(128, 12) == 0.0
