import numpy as np
import pytest
from llm_serving.worker.logprobs import log_normalizers, most_likely


def test_log_normalizers_match_float64():
    logits = np.random.default_rng(0).normal(scale=8, size=(5, 1000)).astype(np.float32)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    # A pairwise float32 sum of 1,000 terms errs by less than 1e-6 of itself, its logarithm by as much absolutely.
    np.testing.assert_allclose(log_normalizers(logits), exact, rtol=0, atol=1e-6)


def test_log_normalizers_of_large_and_forbidden_logits():
    logits = np.array([[3e38, -np.inf, 0.0]], np.float32)
    assert log_normalizers(logits).tolist() == [float(np.float32(3e38))]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_most_likely_breaks_ties_by_the_lowest_id(count):
    values = np.array([1, 7, 3, 7, 3], np.float32)
    assert most_likely(values, count).tolist() == [1, 3, 2, 4, 0][:count]
