import itertools

import numpy as np
import pytest
from llm_serving_simulator.non_negative import solve


def by_trying_all(matrix, target):
    """The best of all subsets of columns whose own solution is not negative."""
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
def test_it_is_the_best_of_all_that_are_not_negative(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(12, 5)) * 10.0 ** rng.integers(-4, 5, size=5)
    target = matrix @ rng.normal(size=5) + rng.normal(size=12)
    assert solve(matrix, target) == pytest.approx(by_trying_all(matrix, target), rel=1e-6, abs=1e-12)


def test_a_column_of_zeros_and_nothing_to_explain_get_nothing():
    assert solve(np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([2.0, 4.0])).tolist() == [0.0, pytest.approx(3.0)]
    assert solve(np.ones((3, 2)), -np.ones(3)).tolist() == [0.0, 0.0]
