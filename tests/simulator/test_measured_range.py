from __future__ import annotations

import pytest
from llm_serving.errors import ConfigError
from llm_serving_simulator.figures import figures_of
from llm_serving_simulator.profile import MeasuredRange, StepShape, measured_maxima, read_profile, write_profile
from llm_serving_simulator.report import table
from llm_serving_simulator.tuner.problem import Figure, TuningObjective, largest_steps, search_space, unmeasured_values
from support.simulator_workloads import config_with, create_load, create_profile, simulate

BUDGET, SLOTS = "scheduler_config.max_prefill_tokens", "model_config.decode_batch_size"


def test_measured_range_needs_several_steps():
    shapes = [StepShape(rows, 10 * rows, rows, 0, 0, 0) for rows in (1, 2, 3, 4, 50)]
    assert measured_maxima(shapes) == {"rows": 3, "tokens": 30, "context": 0, "pairs": 0}
    assert measured_maxima(shapes[:1])["rows"] == 1
    assert measured_maxima([]) == {}


def test_extrapolated_steps_are_counted_and_named():
    load = create_load(*[0.0] * 8, num_prompt=100)
    result = simulate(load, create_profile(measured_to={"tokens": 128, "rows": 8}))
    figures = figures_of(result)
    assert 0 < figures["extrapolated_steps"] < figures["steps"]
    text = table([(result, figures)])
    assert "BEYOND WHAT WAS MEASURED" in text and "tokens up to 800 (measured: 128)" in text
    within = simulate(load, create_profile(measured_to={"tokens": 800, "rows": 8}))
    assert figures_of(within)["extrapolated_steps"] == 0
    assert "BEYOND WHAT WAS MEASURED" not in table([(within, figures_of(within))])
    assert figures_of(simulate(load, create_profile()))["extrapolated_steps"] == 0  # a handwritten profile has no range


def test_search_space_stays_in_the_measured_range():
    config, reach = (
        config_with(**{BUDGET.replace(".", "__"): 512, SLOTS.replace(".", "__"): 8}),
        MeasuredRange({"rows": 60, "tokens": 1000}),
    )
    goal = TuningObjective(Figure("", "output_tokens_per_s"), maximize=True)
    values = {each.key: each.values for each in search_space(config, create_load(0.0), goal, measured=reach)}
    assert max(values[BUDGET]) == 1024 and max(values[SLOTS]) == 64
    (slots, budget) = unmeasured_values(reach)
    assert slots.startswith(f"{SLOTS}: 96, 128, 192, 256 are not tried: the profile has steps of at most 60 rows")
    assert budget.startswith(f"{BUDGET}: 2048, 4096 are not tried")
    small = config_with(scheduler_config__max_prefill_tokens=700)
    values = {
        each.key: each.values
        for each in search_space(small, create_load(0.0), goal, measured=MeasuredRange({"tokens": 300}))
    }
    assert values[BUDGET][-1] == 700  # its current value stays
    assert largest_steps(config_with(scheduler_config__max_prefill_tokens=8192))[1] == 8192


def test_profile_stores_its_measured_range(tmp_path):
    profile = create_profile(measured_to={"rows": 8.0, "pairs": 0.0})
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    path.write_text(path.read_text().replace('"rows": 8.0', '"row": 8.0'))
    with pytest.raises(ConfigError, match=r"profile.json:\d+: `measured_to.row` must be one of rows, tokens"):
        read_profile(path)
