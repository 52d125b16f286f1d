"""What predictions lacked is made up for."""

from __future__ import annotations

import pytest
from llm_serving.admission.corrections import Corrections


def test_a_prediction_that_is_always_half_of_what_comes_is_doubled() -> None:
    corrections: Corrections[str] = Corrections()
    assert corrections.factor("a") == 1.0
    for _ in range(1000):
        corrections.learn("a", 1.0, 2.0)
    assert corrections.factor("a") == pytest.approx(2.0, rel=0.02)
    assert corrections.factor("b") == 1.0


def test_the_middle_counts_and_not_the_extremes() -> None:
    corrections: Corrections[str] = Corrections()
    for _ in range(1000):
        corrections.learn("a", 1.0, 2.0)
        corrections.learn("a", 1.0, 0.5)
    assert corrections.factor("a") == pytest.approx(1.0, rel=0.05)


def test_no_correction_is_beyond_a_factor_of_four() -> None:
    corrections: Corrections[str] = Corrections()
    for _ in range(2000):
        corrections.learn("a", 1.0, 1e9)
        corrections.learn("b", 1.0, 1e-9)
        corrections.learn("c", 0.0, 1.0)
    assert corrections.factor("a") == pytest.approx(4.0, rel=0.05)
    assert corrections.factor("b") == pytest.approx(0.25, rel=0.05)
    assert corrections.factor("c") == 1.0


def test_what_was_long_ago_is_forgotten() -> None:
    corrections: Corrections[str] = Corrections()
    for real_s in [3.0] * 1000 + [1.0] * 2000:
        corrections.learn("a", 1.0, real_s)
    assert corrections.factor("a") == pytest.approx(1.0, abs=0.02)
