import pytest
from llm_serving_simulator.calibration import INTERVAL_S, find_slow_intervals
from llm_serving_simulator.profile import StepShape
from llm_serving_simulator.recordings import MeasuredStep


def measured(factor_at, count=2000):
    """Return consecutive steps of one to four rows in turn."""
    steps, before = [], 0.0
    for number in range(count):
        rows = 1 + number % 4
        seconds = factor_at(before) * (0.001 + 0.0005 * rows)
        steps.append(MeasuredStep(StepShape(rows, rows, rows, 9, 0, 0), before - 0.001, None, before, before + seconds))
        before += seconds
    return steps


def test_slow_intervals_have_a_factor_and_a_mean():
    steps = measured(lambda time: 2.0 if 2 * INTERVAL_S <= time < 4 * INTERVAL_S else 1.0)
    slow = find_slow_intervals(steps)
    assert sorted(slow.factors) == [2, 3]
    assert slow.factor(2.5 * INTERVAL_S) == pytest.approx(2.0, rel=0.05)
    assert slow.factor(1.5 * INTERVAL_S) == 1.0
    assert slow.mean == pytest.approx(1 + 2 / slow.num_intervals, rel=0.02)


def test_slow_interval_is_found_if_it_has_most_steps_of_some_shapes():
    steps, before = [], 0.0
    for number in range(1200):
        is_slow = 400 <= number < 600
        rows = ((2, 2, 1, 2, 3) if is_slow else (1, 3, 4, 1, 2))[number % 5]
        seconds = (1.33 if is_slow else 1.0) * (0.009 + 0.0005 * rows)
        steps.append(MeasuredStep(StepShape(rows, rows, rows, 9, 0, 0), before - 0.001, None, before, before + seconds))
        before += seconds
    slow = find_slow_intervals(steps)
    assert slow.factor(steps[500].reply_s) == pytest.approx(1.33, rel=0.03)
    assert slow.factor(steps[100].reply_s) == slow.factor(steps[900].reply_s) == 1.0


def test_slow_intervals_exclude_steps_with_slow_shapes():
    slow = find_slow_intervals(measured(lambda time: 1.0))
    assert (slow.factors, slow.mean) == ({}, 1.0)
