"""The simulation of the contest: its step times are the published ones, and its makespans add up."""

import pytest
from contest_simulation import FORK, OURS, PREFILL_MS, SERIAL, Load, StepTime, load, prefill_ms, simulate

TIME = StepTime(decode_ms=20.0, per_request_ms=1.0, padded=4096)


def test_published_times_are_met_and_gone_on_with():
    assert [prefill_ms(tokens) for tokens, _ in PREFILL_MS] == [ms for _, ms in PREFILL_MS]
    assert prefill_ms(1) == 35.0
    assert prefill_ms(384) == 55.0
    # The contest's profile says 341: 76 % of 674 s for 1,500 prompts.
    assert prefill_ms(4096) == pytest.approx(320.0)


def test_one_request_after_the_other():
    given = Load([10, 500], [3, 2], [0.0, 0.1])
    result = simulate(given, TIME, SERIAL)
    prompt, token = prefill_ms(4096) / 1e3, 0.020
    assert result.makespan == pytest.approx(2 * prompt + 3 * token)  # a prompt's step gives the first token
    assert result.first_tokens == pytest.approx([prompt, 2 * prompt + 2 * token - 0.1])
    assert (result.num_decode_steps, result.num_further) == (3, 0)


def test_prompts_go_first_in_the_fork_and_requests_decode_together():
    given = Load([10, 10], [3, 3], [0.0, 0.0])
    result = simulate(given, TIME, FORK)
    assert result.prefill == pytest.approx(2 * prefill_ms(4096) / 1e3)
    assert result.decode == pytest.approx(2 * 0.021)
    assert result.num_further == 2


def test_ours_packs_prompts_and_pads_none():
    given = Load([100, 156], [1, 1], [0.0, 0.0])
    result = simulate(given, StepTime(20.0, 1.0), (*OURS, "scheduler_config.policy=prefill_first"))
    assert result.makespan == pytest.approx(prefill_ms(256) / 1e3)


def test_the_load_is_the_same_for_the_same_seed():
    given = load(30, 10.0, 1)
    assert given == load(30, 10.0, 1) != load(30, 10.0, 2)
    assert given.arrivals == sorted(given.arrivals)
