import numpy as np
import pytest
from llm_serving_simulator.cost_model import CostModel, Piece
from llm_serving_simulator.fitting import STEP_PIECES, Sometimes, fit
from llm_serving_simulator.step_shape import StepShape

TRUE = CostModel((Piece("step", 1e-3), Piece("tokens", 4e-5, 16), Piece("rows", 1e-5), Piece("context", 2e-8)))


def shapes(count=600, seed=1):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows = int(rng.integers(1, 64))
        tokens = rows + int(rng.integers(0, 2)) * int(rng.integers(0, 500))
        yield StepShape(rows, tokens, rows, int(rng.integers(tokens, 20_000)), 0, 0)


def test_what_made_the_times_is_found_again():
    some = list(shapes())
    found = fit(some, [TRUE.seconds(each) for each in some], STEP_PIECES)
    assert found.median_error < 1e-3
    assert found.num_fitted + found.num_held_out == len(some)
    other = StepShape(8, 300, 8, 4000, 0, 0)
    assert found.model.seconds(other) == pytest.approx(TRUE.seconds(other), rel=0.01)


def test_noise_is_spread_and_the_mean_is_predicted():
    some = list(shapes(4000))
    noise = np.random.default_rng(2).choice([0.8, 0.9, 1.0, 1.5], len(some))
    found = fit(some, [TRUE.seconds(each) * factor for each, factor in zip(some, noise, strict=True)], STEP_PIECES)
    ratios = [found.model.seconds(each) / TRUE.seconds(each) for each in some]
    assert np.mean(ratios) == pytest.approx(noise.mean(), rel=0.02)
    assert found.spread[0] == pytest.approx(0.8 / 1.05, rel=0.1)
    assert np.mean(found.spread) == pytest.approx(1.0, abs=0.03)


def test_outliers_count_as_little_more_than_the_rest():
    some = list(shapes(2000))
    times = [TRUE.seconds(each) * (500 if number % 100 == 0 else 1) for number, each in enumerate(some)]
    found = fit(some, times, STEP_PIECES)
    assert found.median_error < 0.05


def test_what_only_some_measurements_have_is_told_apart():
    some, more = list(shapes()), CostModel((Piece("step", 5e-4), Piece("rows", 2e-5)))
    holds = [number % 3 == 0 for number in range(len(some))]
    times = [TRUE.seconds(each) + has * more.seconds(each) for each, has in zip(some, holds, strict=True)]
    found = fit(some, times, STEP_PIECES, sometimes=Sometimes((Piece("step", 1.0), Piece("rows", 1.0)), holds))
    other = StepShape(8, 300, 8, 4000, 0, 0)
    assert found.sometimes.seconds(other) == pytest.approx(more.seconds(other), rel=0.01)
    assert found.seconds(other, has_more=True) == pytest.approx(TRUE.seconds(other) + more.seconds(other), rel=0.01)
    assert len(found.tested) == found.num_held_out
    assert max(abs(ratio - 1) for _, ratio in found.tested) < 0.02


def test_a_piece_that_nothing_reaches_is_left_out():
    found = fit([StepShape(1, 1, 1, 10, 0, 0)] * 20, [0.5] * 20, STEP_PIECES)
    assert {piece.of for piece in found.model.pieces} <= {"step", "tokens", "rows", "samples", "context"}
    assert all(piece.above < 1 for piece in found.model.pieces)


def test_of_no_measurements_there_is_a_model_of_no_time():
    found = fit([], [], STEP_PIECES)
    assert found.model.seconds(StepShape(8, 300, 8, 4000, 0, 0)) == 0.0
    assert (found.num_fitted, found.median_error, set(found.spread)) == (0, 0.0, {1.0})
