import pytest
from llm_serving_simulator.disturbed_spells import SPELL_S, disturbed_spells
from llm_serving_simulator.measured_steps import MeasuredStep
from llm_serving_simulator.step_shape import StepShape


def measured(factor_at, count=2000):
    """Steps of one to four rows in turn, one behind the other."""
    steps, before = [], 0.0
    for number in range(count):
        rows = 1 + number % 4
        seconds = factor_at(before) * (0.001 + 0.0005 * rows)
        steps.append(MeasuredStep(StepShape(rows, rows, rows, 9, 0, 0), before - 0.001, None, before, before + seconds))
        before += seconds
    return steps


def test_a_slow_spell_is_found_and_what_it_costs_on_average():
    steps = measured(lambda time: 2.0 if 2 * SPELL_S <= time < 4 * SPELL_S else 1.0)
    spells = disturbed_spells(steps)
    assert sorted(spells.factors) == [2, 3]
    assert spells.factor(2.5 * SPELL_S) == pytest.approx(2.0, rel=0.05)
    assert spells.factor(1.5 * SPELL_S) == 1.0
    assert spells.mean == pytest.approx(1 + 2 / spells.num, rel=0.02)


def test_a_spell_that_is_slower_by_a_third_is_one_though_steps_of_some_rows_were_mostly_measured_then():
    steps, before = [], 0.0
    for number in range(1200):
        slow = 400 <= number < 600
        rows = ((2, 2, 1, 2, 3) if slow else (1, 3, 4, 1, 2))[number % 5]
        seconds = (1.33 if slow else 1.0) * (0.009 + 0.0005 * rows)
        steps.append(MeasuredStep(StepShape(rows, rows, rows, 9, 0, 0), before - 0.001, None, before, before + seconds))
        before += seconds
    spells = disturbed_spells(steps)
    assert spells.factor(steps[500].replied_s) == pytest.approx(1.33, rel=0.03)
    assert spells.factor(steps[100].replied_s) == spells.factor(steps[900].replied_s) == 1.0


def test_what_is_slow_by_its_shape_is_not_disturbed():
    spells = disturbed_spells(measured(lambda time: 1.0))
    assert (spells.factors, spells.mean) == ({}, 1.0)
