"""How fast a queue gets shorter."""

from __future__ import annotations

import pytest
from llm_serving.admission.drain_rate import MIN_ENDS, DrainRate


def test_ends_count_while_somebody_waits() -> None:
    rate, now = DrainRate(), 0.0
    for _ in range(3 * MIN_ENDS):
        rate.waits(now, True)
        now += 0.5
        rate.ended(now)
        rate.waits(now, False)
        now += 10.0
        rate.ended(now)
    assert rate.per_second(now) == pytest.approx(2.0)


def test_nothing_is_told_after_a_few() -> None:
    rate = DrainRate()
    rate.waits(0.0, True)
    for number in range(MIN_ENDS - 1):
        rate.ended(number + 1.0)
    assert rate.per_second(MIN_ENDS) is None


def test_a_server_that_stands_still_gets_slower_while_it_does() -> None:
    rate = DrainRate()
    rate.waits(0.0, True)
    for number in range(100):
        rate.ended(number + 1.0)
    before, later = rate.per_second(100.0), rate.per_second(1000.0)
    assert before is not None and later is not None and later < before / 5


def test_what_was_long_ago_is_forgotten() -> None:
    rate, now = DrainRate(), 0.0
    rate.waits(now, True)
    for seconds in [1.0] * 1000 + [0.1] * 5000:
        now += seconds
        rate.ended(now)
    assert rate.per_second(now) == pytest.approx(10.0, rel=0.01)


def test_a_server_that_becomes_slower_is_believed_sooner_than_one_that_becomes_faster() -> None:
    def after(num_ends: int, before_s: float, then_s: float) -> float:
        rate, now = DrainRate(), 0.0
        rate.waits(now, True)
        for seconds in [before_s] * 3000 + [then_s] * num_ends:
            now += seconds
            rate.ended(now)
        told = rate.per_second(now)
        assert told is not None
        return told

    assert after(256, 0.1, 0.2) < 0.6 * 10.0
    assert after(256, 0.2, 0.1) < 0.7 * 10.0
