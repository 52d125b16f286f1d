import numpy as np
import pytest
from llm_serving.errors import ConfigError
from llm_serving_simulator.profile import (
    CostModel,
    CostTerm,
    StepShape,
    read_profile,
    segments,
    shape_of_rows,
    write_profile,
)
from llm_serving_simulator.report import profile_source
from support.simulator_workloads import create_profile

WRITTEN = """\
format: 1
name: NPU
source: a data sheet, 2023
measured: false
step:
  - {of: step, seconds: 0.01}
  - {of: tokens, seconds: 0.001, above: 16, to: 32}
"""


def test_profile_round_trip(tmp_path):
    pieces = CostModel((CostTerm("step", 0.25), CostTerm("tokens", 0.5, 4, 8)))
    numbers = {"latency_s": 5e-05, "spread": (0.5, 1.5), "block_size": 32}
    profile = create_profile(step=pieces, form=pieces, **numbers, notes={"machine": "m"})
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


def test_results_of_a_handwritten_profile_are_marked(tmp_path):
    (tmp_path / "npu.yaml").write_text(WRITTEN)
    profile = read_profile(tmp_path / "npu.yaml")
    assert profile_source(profile) == "NOT MEASURED: times of NPU are figures of a data sheet, 2023"
    assert profile.step.seconds(StepShape(1, 20, 1, 20, 0, 0)) == pytest.approx(0.014)
    assert profile.step.seconds(StepShape(1, 99, 1, 99, 0, 0)) == pytest.approx(0.026)


@pytest.mark.parametrize("written", ["1e-2", "1.0e-2", "1.0E-02", "0.01"])
def test_profile_numbers_may_have_exponents(tmp_path, written):
    (tmp_path / "npu.yaml").write_text(WRITTEN.replace("0.01}", f"{written}}}"))
    assert read_profile(tmp_path / "npu.yaml").step.terms[0].seconds == 0.01
    (tmp_path / "npu.yaml").write_text(WRITTEN.replace("0.01}", "1.5e2}"))
    assert read_profile(tmp_path / "npu.yaml").step.terms[0].seconds == 150


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("format: 1", "format: 2", "npu.yaml:1: `format` must be 1. Given: 2"),
        ("of: tokens", "of: token", r"npu.yaml:5: `step.1.of` must be one of step, rows, tokens"),
        ("to: 32", "to: 8", "`step.1.to` must be a number > 16"),
        ("seconds: 0.01}", "seconds: fast}", "`step.0.seconds` must be seconds >= 0. Given: 'fast'"),
        ("measured: false\n", "", "`measured` must be given"),
        ("name: NPU", "nam: NPU", "`name` must be given"),
    ],
)
def test_invalid_profile_error_has_a_line(tmp_path, before, after, error):
    (tmp_path / "npu.yaml").write_text(WRITTEN.replace(before, after, 1))
    with pytest.raises(ConfigError, match=error):
        read_profile(tmp_path / "npu.yaml")


def test_cost_segments_must_be_contiguous():
    model = CostModel(tuple(segments("tokens", (16, 64))))
    assert [model.seconds(StepShape(1, tokens, 1, 0, 0, 0)) for tokens in (3, 16, 40, 64, 100)] == [3, 16, 40, 64, 100]


def test_step_shape_counts_keys_and_pairs():
    shape = shape_of_rows(np.array([1, 4], np.int32), np.array([10, 2], np.int32), 2, 3)
    assert shape == StepShape(rows=2, tokens=5, samples=2, context=17, pairs=4 * 2 + 10, moves=3)
