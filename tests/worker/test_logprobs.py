"""Log-probabilities and exact token weights."""

from fractions import Fraction

import numpy as np
import pytest
from llm_serving.models.spec import MAX_VOCAB_SIZE
from llm_serving.worker.logprobs import (
    draw_token,
    filter_weights,
    keep_heaviest,
    log_normalizers,
    logprobs_of,
    most_likely,
    token_weights,
    total_weight,
    weight_scale,
)


def normalizers(logits):
    return log_normalizers(logits.max(axis=1), np.array([total_weight(row) for row in logits]))


def test_log_normalizers_match_float64():
    logits = np.random.default_rng(0).normal(scale=8, size=(5, 1000)).astype(np.float32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    # Tokens with most of the weight have exponents of a few units, so their weights have an error of some 2^-22; each
    # of 1,000 is rounded by at most 2^-34. The logarithm has the same absolute error.
    np.testing.assert_allclose(normalizers(logits), exact, rtol=0, atol=1e-6)


def test_log_normalizers_of_large_and_forbidden_logits():
    logits = np.array([[3e38, -np.inf, 0.0]], np.float32)
    assert normalizers(logits).tolist() == [float(np.float32(3e38))]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_most_likely_breaks_ties_by_the_lowest_id(count):
    values = np.array([1, 7, 3, 7, 3], np.float32)
    assert most_likely(values, count).tolist() == [1, 3, 2, 4, 0][:count]


def test_logprobs_too_small_for_float32_are_minus_infinity():
    logits = np.array([[3e38, -3e38]], np.float32)
    top = np.array([[0, 1]], np.int32)
    chosen, likely = logprobs_of(logits, np.array([1], np.int32), top, logits[:, 0], np.ones(1))
    assert chosen.tolist() == [-np.inf]
    assert likely.of(0) == ([0, 1], [0, -np.inf])


ONE = np.float32(1)


def weights_of(values, temperature=1.0):
    values = np.asarray(values, np.float32)
    return token_weights(values, values.max(), weight_scale(np.float32(temperature)))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 7.0])
def test_weights_are_the_exponential_rounded_to_the_quantum(temperature):
    values = np.linspace(-30 * temperature, 0, 10_007).astype(np.float32)
    exact = np.exp(values.astype(np.float64) / np.float64(np.float32(temperature)))
    # The exponent y has an error of 3 roundings of 2^-24, that is |y| * 3 * 2^-24 * ln 2 of the weight; the polynomial
    # and
    # its Horner steps of less than 4 * 2^-24; the quantum of half of 2^-33.
    exponent = np.abs(values / temperature) / np.log(2)
    bound = exact * 2.0**-24 * (4 + 3 * np.log(2) * exponent) + 2.0**-34
    assert (np.abs(weights_of(values, temperature) - exact) <= bound).all()


def test_weights_are_multiples_of_the_quantum_from_0_to_1():
    weights = weights_of(np.linspace(-40, 0, 50_021)).astype(np.float64)
    assert (weights * 2.0**33 == np.floor(weights * 2.0**33)).all()
    assert weights.max() == weights[-1] == 1
    assert weights.min() == weights[0] == 0


def test_sums_of_the_largest_vocabulary_are_exact_in_every_order():
    # Only weights of the largest logit have more bits than their sum can hold.
    values = np.random.default_rng(0).normal(scale=0.01, size=MAX_VOCAB_SIZE)
    weights = weights_of(values)
    exact = sum(map(Fraction, weights[:1000].tolist()), Fraction(0)) + Fraction(weights[1000:].sum(dtype=np.float64))
    assert Fraction(weights.sum(dtype=np.float64)) == exact
    assert weights.cumsum(dtype=np.float64)[-1] == weights[::-1].cumsum(dtype=np.float64)[-1]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 100])
def test_extreme_temperatures_give_finite_weights(temperature):
    weights = weights_of([1, 3, 3, -np.inf, -3e38], temperature)
    assert weights[[1, 2, 3]].tolist() == [1, 1, 0]
    assert np.isfinite(weights).all()


def test_filters_break_ties_by_the_lowest_id():
    weights = np.array([0.5, 1, 0.5, 0.25, 0.5], np.float32)
    assert keep_heaviest(weights, 3).tolist() == [0.5, 1, 0.5, 0, 0]
    assert keep_heaviest(weights, 9).tolist() == weights.tolist()


def test_sampling_filters_apply_in_sequence():
    weights = np.array([1, 0.5, 0.25, 0.125, 0.125], np.float32)
    assert filter_weights(weights, 0, 1.0, np.float32(0.25)).tolist() == [1, 0.5, 0.25, 0, 0]
    assert filter_weights(weights, 2, 1.0, np.float32(0.25)).tolist() == [1, 0.5, 0, 0, 0]
    # 1 / 1.5 is less than 0.7 of the weight left by top_k, but more than 0.6 of it.
    assert filter_weights(weights, 2, 0.7, np.float32(0)).tolist() == [1, 0.5, 0, 0, 0]
    assert filter_weights(weights, 2, 0.6, np.float32(0)).tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("last", [5, 200, 255])
def test_tokens_without_weight_are_never_drawn(last):
    weights = np.zeros(256, np.float32)
    weights[[3, last]] = 1 / 3, 1
    assert draw_token(weights, 0.0) == 3
    assert draw_token(weights, 1 - 2.0**-53) == last
