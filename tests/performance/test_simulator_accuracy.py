from dataclasses import replace

import pytest
from benchmarks.simulator_accuracy import (
    LIGHT,
    LIGHT_TIMES,
    SIMULATIONS,
    Cell,
    answers_of,
    predict,
    slowed,
    slowness_of,
    with_texts,
    workload,
)
from llm_serving_simulator.figures import figures_of
from llm_serving_simulator.profile import CostModel, CostTerm, StepShape
from llm_serving_simulator.recordings import MeasuredStep, Timings
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.workload import Workload, WorkloadStream, read_workload
from support.recordings import record_steps
from support.simulator_workloads import STEP_S, config_with, create_load, create_profile

SHAPE = StepShape(rows=1, tokens=1, samples=1, context=8, pairs=0, moves=0)


def test_light_accuracy_workloads_last_longer(tmp_path):
    path = tmp_path / "light.yaml"
    path.write_text(workload("light", 4, 10.0, 10.0, 1))
    requests = read_workload(path).streams[0].requests
    assert max(each.due_s for each in requests) > 30
    assert len(requests) == pytest.approx(LIGHT * 10.0 * LIGHT_TIMES * 10.0, rel=0.3)


def test_workload_is_simulated_with_recorded_answers(tmp_path):
    (tmp_path / "a.rec").write_bytes(record_steps(5))
    asked = create_load(0.0).streams[0].requests[0]
    both = [replace(asked, prompt_token_ids=[100, 101, 102, 103]), asked]
    load = with_texts(Workload("both", (WorkloadStream("s", both),)), answers_of(tmp_path))
    assert [list(each.answer_token_ids) for each in load.streams[0].requests] == [[7] * 5, []]


def test_slowness_is_measured_in_the_last_run_of_a_workload():
    profile = create_profile(
        step=CostModel((CostTerm("step", STEP_S),)), form=CostModel((CostTerm("step", STEP_S / 2),))
    )

    def step(began_s: float, seconds: float, *, ahead: bool) -> MeasuredStep:
        asked_s = began_s - 0.001 if ahead else began_s
        return MeasuredStep(SHAPE, asked_s, None, began_s if ahead else 0.0, began_s + seconds)

    spans = [(1.0, 9 * STEP_S, True), (5.0, 1.2 * STEP_S, True), (5.1, 1.5 * 1.4 * STEP_S, False), (9.0, STEP_S, True)]
    timings = Timings(
        [step(began_s, seconds, ahead=ahead) for began_s, seconds, ahead in spans],
        arrivals={"light-0-a": 0.9, "light-0-b": 4.9, "light-10-c": 5.0, "overload-0-d": 8.9},
        replies={"light-0-b": [5.1], "light-10-c": [5.3], "overload-0-d": [9.1]},
    )
    assert slowness_of(Cell("default", "light"), timings, profile) == pytest.approx((1.2 + 1.5 * 1.4) / (1 + 1.5))
    assert slowed(profile, 1.2).step.seconds(SHAPE) == pytest.approx(1.2 * STEP_S)
    assert slowed(profile, 1.2).form == profile.form


def test_prediction_is_the_median_of_several_simulations():
    profile, load = create_profile(spread=(0.5, 1.0, 2.0)), create_load(*(0.01 * number for number in range(20)))
    runs = [figures_of(Simulation(config_with(), load, profile, seed).run()) for seed in range(3, 3 + SIMULATIONS)]
    values = sorted(each["ttft_p50_ms"] for each in runs)
    found = predict(config_with(), load, profile, 3)["ttft_p50_ms"]
    assert found == values[SIMULATIONS // 2] != values[0]
