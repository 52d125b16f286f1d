"""The simulation of the contest: the profile meets what was published, and makespans add up."""

from pathlib import Path

import pytest
from contest_simulation import FORK, OURS, PROFILE, SERIAL, Load, StepTime, load, simulate
from llm_serving.whatif.cost_model import CostModel, Piece
from llm_serving.whatif.profile import read_profile
from llm_serving.whatif.step_shape import StepShape

MODEL = CostModel((Piece("step", 0.02), Piece("rows", 0.001), Piece("tokens", 0.0001)))
TIME = StepTime(MODEL, padded=4096)


def seconds(*, prompts: int = 0, length: int = 0, decoding: int = 0) -> float:
    rows, pairs = prompts + decoding, prompts * length * (length + 1) // 2
    shape = StepShape(rows, prompts * length + decoding, rows, 0, pairs, 0)
    return read_profile(PROFILE).step.seconds(shape)


def test_the_profile_meets_what_was_published():
    batches = {1: 35, 2: 2 * 21, 4: 4 * 17, 8: 8 * 13, 16: 16 * 11}
    for count, ms in batches.items():
        assert 1e3 * seconds(prompts=count, length=128) == pytest.approx(ms, rel=0.01)
    assert 1e3 * seconds(prompts=1, length=4096) == pytest.approx(341, rel=0.01)
    assert 1e3 * seconds(decoding=1) == pytest.approx(26.7, rel=0.01)
    assert 1e3 * (seconds(decoding=100) - seconds(decoding=99)) == pytest.approx(1.13, rel=0.01)


@pytest.mark.parametrize("path", sorted(PROFILE.parent.glob("*.yaml")), ids=lambda path: path.stem)
def test_profiles_of_hardware_elsewhere_say_so(path: Path):
    assert not read_profile(path).measured
    assert "published" in read_profile(path).source or "data sheet" in read_profile(path).source


def test_one_request_after_the_other():
    given = Load([10, 500], [3, 2], [0.0, 0.1])
    result = simulate(given, TIME, SERIAL)
    prompt, token = 0.021 + 0.4096, 0.021 + 0.0001
    assert result.makespan == pytest.approx(2 * prompt + 3 * token)  # a prompt's step gives the first token
    assert result.first_tokens == pytest.approx([prompt, 2 * prompt + 2 * token - 0.1])


def test_prompts_go_first_in_the_fork_and_requests_decode_together():
    given = Load([10, 10], [3, 3], [0.0, 0.0])
    result = simulate(given, TIME, FORK)
    assert result.prefill == pytest.approx(2 * (0.021 + 0.4096))
    assert result.decode == pytest.approx(2 * (0.022 + 0.0002))


def test_ours_packs_prompts_and_pads_none():
    given = Load([100, 156], [1, 1], [0.0, 0.0])
    result = simulate(given, StepTime(MODEL), (*OURS, "scheduler_config.policy=prefill_first"))
    assert result.makespan == pytest.approx(0.022 + 0.0256)


def test_the_load_is_the_same_for_the_same_seed():
    given = load(30, 10.0, 1)
    assert given == load(30, 10.0, 1) != load(30, 10.0, 2)
    assert given.arrivals == sorted(given.arrivals)
