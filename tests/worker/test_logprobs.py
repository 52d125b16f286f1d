import numpy as np
import pytest
from llm_serving.worker.logprobs import log_normalizers, logprobs_of, most_likely, total_weight


def normalizers(logits):
    return log_normalizers(logits.max(axis=1), np.array([total_weight(row) for row in logits]))


def test_log_normalizers_match_float64():
    logits = np.random.default_rng(0).normal(scale=8, size=(5, 1000)).astype(np.float32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    # The tokens that hold the weight have exponents of a few units, hence weights within some 2^-22 of themselves;
    # each of 1,000 is rounded by at most 2^-34. The logarithm errs by as much absolutely.
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
