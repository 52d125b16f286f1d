"""Scaling in simulation: the interpreter of a master is shared, and tenants are hashed to masters."""

from dataclasses import replace

import pytest
from benchmarks.scaling import PUBLISHED, load, main, play, shares_of_masters, with_master
from llm_serving_simulator.profile import read_profile


def test_scaling_is_limited_by_the_time_of_the_master_per_token() -> None:
    published = read_profile(PUBLISHED)
    given = load(4, 12, 4, seed=1)
    quick, slow = (play(given, 4, with_master(published, 0.0, 0.0, token_s)) for token_s in (1e-5, 0.02))
    assert all(each.ok for each in quick.outcomes + slow.outcomes)
    assert quick.master_share < 0.1 < 0.5 < slow.master_share <= 1.0
    ends = [max(each.end_s for each in result.outcomes) for result in (quick, slow)]
    assert ends[1] > 1.5 * ends[0]


def test_scaling_includes_waiting_for_the_interpreter() -> None:
    published = read_profile(PUBLISHED)
    given = load(4, 12, 4, seed=1)
    shared = with_master(published, 0.0, 0.05, 0.0)
    separate = replace(shared, one_interpreter=False)
    ends = [max(each.end_s for each in play(given, 4, profile).outcomes) for profile in (shared, separate)]
    assert ends[0] > 1.2 * ends[1]


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_scaling_distributes_the_workload_over_masters(exponent: float) -> None:
    shares = shares_of_masters(16, exponent)
    assert len(shares) == 16
    assert sum(shares) == pytest.approx(16)
    assert shares == sorted(shares)


def test_scaling_shows_a_master_overloaded_by_a_large_tenant() -> None:
    assert shares_of_masters(64, 0.0)[-1] < 1.6
    assert shares_of_masters(64, 1.0)[-1] > 5


def test_scaling_states_the_source_of_the_step_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "1", "--masters", "", "--requests", "5"]) == 0
    head = capsys.readouterr().out.partition("\n")[0]
    assert "; NOT MEASURED: times of Llama-2-7B float16 on the contest's NPU are figures of the older servers'" in head
    assert "CostTerm" not in head
