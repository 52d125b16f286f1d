"""Scaling in simulation: a master has one interpreter, and tenants go where their names hash to."""

from dataclasses import replace

import pytest
from benchmarks.scaling import PUBLISHED, load, play, shares_of_masters, with_master
from llm_serving_simulator.profile import read_profile


def test_a_master_that_takes_too_long_for_a_token_slows_all_its_replicas() -> None:
    published = read_profile(PUBLISHED)
    given = load(4, 12, 4, seed=1)
    quick, slow = (play(given, 4, with_master(published, 0.0, 0.0, token_s)) for token_s in (1e-5, 0.02))
    assert all(each.ok for each in quick.outcomes + slow.outcomes)
    assert quick.master_share < 0.1 < 0.5 < slow.master_share <= 1.0
    ends = [max(each.end_s for each in result.outcomes) for result in (quick, slow)]
    assert ends[1] > 1.5 * ends[0]


def test_threads_of_one_interpreter_wait_for_each_other() -> None:
    published = read_profile(PUBLISHED)
    given = load(4, 12, 4, seed=1)
    shared = with_master(published, 0.0, 0.05, 0.0)
    alone = replace(shared, one_interpreter=False)
    ends = [max(each.end_s for each in play(given, 4, profile).outcomes) for profile in (shared, alone)]
    assert ends[0] > 1.2 * ends[1]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_masters_share_the_whole_load(exponent: float) -> None:
    shares = shares_of_masters(16, exponent)
    assert len(shares) == 16
    assert sum(shares) == pytest.approx(16)
    assert shares == sorted(shares)


def test_a_large_tenant_overloads_one_of_many_masters() -> None:
    assert shares_of_masters(64, 0.0)[-1] < 1.6
    assert shares_of_masters(64, 1.0)[-1] > 5
