import itertools

import numpy as np
import pytest
from llm_serving_simulator.fitting import STEP_TERMS, ConditionalTerms, fit, least_squares
from llm_serving_simulator.profile import CostModel, CostTerm, StepShape

TRUE = CostModel(
    (CostTerm("step", 1e-3), CostTerm("tokens", 4e-5, 16), CostTerm("rows", 1e-5), CostTerm("context", 2e-8))
)


def shapes(count=600, seed=1):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(rng.integers(1, 64))
        tokens = rows + int(rng.integers(0, 2)) * int(rng.integers(0, 500))
        yield StepShape(rows, tokens, rows, int(rng.integers(tokens, 20_000)), 0, 0)


def test_fit_recovers_the_model_that_made_the_times():
    some = list(shapes())
    found = fit(some, [TRUE.seconds(each) for each in some], STEP_TERMS)
    assert found.median_error < 1e-3
    assert found.num_fitted + found.num_held_out == len(some)
    other = StepShape(8, 300, 8, 4000, 0, 0)
    assert found.model.seconds(other) == pytest.approx(TRUE.seconds(other), rel=0.01)


def test_fit_predicts_the_mean_of_noisy_times_and_reports_their_spread():
    some = list(shapes(4000))
    noise = np.random.default_rng(2).choice([0.8, 0.9, 1.0, 1.5], len(some))
    found = fit(some, [TRUE.seconds(each) * factor for each, factor in zip(some, noise, strict=True)], STEP_TERMS)
    ratios = [found.model.seconds(each) / TRUE.seconds(each) for each in some]
    assert np.mean(ratios) == pytest.approx(noise.mean(), rel=0.02)
    assert found.spread[0] == pytest.approx(0.8 / 1.05, rel=0.1)
    assert np.mean(found.spread) == pytest.approx(1.0, abs=0.03)


def test_fit_clips_outliers():
    some = list(shapes(2000))
    times = [TRUE.seconds(each) * (500 if number % 100 == 0 else 1) for number, each in enumerate(some)]
    found = fit(some, times, STEP_TERMS)
    assert found.median_error < 0.05


def test_fit_separates_conditional_terms():
    some, more = list(shapes()), CostModel((CostTerm("step", 5e-4), CostTerm("rows", 2e-5)))
    holds = [number % 3 == 0 for number in range(len(some))]
    times = [TRUE.seconds(each) + has * more.seconds(each) for each, has in zip(some, holds, strict=True)]
    found = fit(
        some, times, STEP_TERMS, conditional=ConditionalTerms((CostTerm("step", 1.0), CostTerm("rows", 1.0)), holds)
    )
    other = StepShape(8, 300, 8, 4000, 0, 0)
    assert found.conditional.seconds(other) == pytest.approx(more.seconds(other), rel=0.01)
    assert found.seconds(other, conditional=True) == pytest.approx(TRUE.seconds(other) + more.seconds(other), rel=0.01)
    assert len(found.tested) == found.num_held_out
    assert max(abs(ratio - 1) for _, ratio in found.tested) < 0.02


def test_fit_leaves_out_terms_that_no_measurement_reaches():
    found = fit([StepShape(1, 1, 1, 10, 0, 0)] * 20, [0.5] * 20, STEP_TERMS)
    assert {piece.of for piece in found.model.terms} <= {"step", "tokens", "rows", "samples", "context"}
    assert all(piece.above < 1 for piece in found.model.terms)


def test_fit_of_no_measurements_predicts_0_s():
    found = fit([], [], STEP_TERMS)
    assert found.model.seconds(StepShape(8, 300, 8, 4000, 0, 0)) == 0.0
    assert (found.num_fitted, found.median_error, set(found.spread)) == (0, 0.0, {1.0})


# least_squares


def by_trying_all_subsets(matrix, target):
    """Return the best non-negative solution of all subsets of columns."""
    count = matrix.shape[1]
    best = np.zeros(count)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            part = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            if (part >= 0).all():
                trial = np.zeros(count)
                trial[list(chosen)] = part
                best = min(best, trial, key=lambda each: np.linalg.norm(matrix @ each - target))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_least_squares_is_the_best_non_negative_solution(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(12, 5)) * 10.0 ** rng.integers(-4, 5, size=5)
    target = matrix @ rng.normal(size=5) + rng.normal(size=12)
    assert least_squares(matrix, target) == pytest.approx(by_trying_all_subsets(matrix, target), rel=1e-6, abs=1e-12)


def test_least_squares_gives_0_for_a_column_of_zeros_and_a_negative_target():
    assert least_squares(np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([2.0, 4.0])).tolist() == [0.0, pytest.approx(3.0)]
    assert least_squares(np.ones((3, 2)), -np.ones(3)).tolist() == [0.0, 0.0]
