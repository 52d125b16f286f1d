"""What the scorecard of predictions asks of a server, and how it tells a slow machine from a wrong model."""

from dataclasses import replace

import pytest
from llm_serving.whatif.cost_model import CostModel, Piece
from llm_serving.whatif.figures import figures_of
from llm_serving.whatif.load import Load, Stream
from llm_serving.whatif.measured_steps import MeasuredStep, Timings
from llm_serving.whatif.simulation import Simulation
from llm_serving.whatif.step_shape import StepShape
from llm_serving.whatif.workload import read_workload
from machine_speed import Speed, at_speed, mean_of, predicted_s, reference, speed_of
from recordings import record_steps
from whatif_loads import STEP_S, config_with, create_load, create_profile
from whatif_scorecard import (
    LIGHT,
    LIGHT_TIMES,
    SIMULATIONS,
    Cell,
    answers_of,
    predict,
    slowness_of,
    speed_around,
    with_texts,
    workload,
)

SHAPE = StepShape(rows=1, tokens=1, samples=1, context=8, pairs=0, moves=0)


def test_a_light_load_lasts_longer_so_that_medians_are_of_many_requests(tmp_path):
    path = tmp_path / "light.yaml"
    path.write_text(workload("light", 4, 10.0, 10.0, 1))
    requests = read_workload(path).streams[0].requests
    assert max(each.due_s for each in requests) > 30
    assert len(requests) == pytest.approx(LIGHT * 10.0 * LIGHT_TIMES * 10.0, rel=0.3)


def test_a_load_is_simulated_with_the_texts_that_it_was_answered(tmp_path):
    (tmp_path / "a.rec").write_bytes(record_steps(5))
    asked = create_load(0.0).streams[0].requests[0]
    both = [replace(asked, prompt_token_ids=[100, 101, 102, 103]), asked]
    load = with_texts(Load("both", (Stream("s", both),)), answers_of(tmp_path))
    assert [list(each.answer_token_ids) for each in load.streams[0].requests] == [[7] * 5, []]


def test_slowness_is_of_the_steps_of_the_last_time_a_load_was_played():
    profile = create_profile(step=CostModel((Piece("step", STEP_S),)), form=CostModel((Piece("step", STEP_S / 2),)))

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


TWO_SPEEDS = create_profile(step=CostModel((Piece("step", 0.009), Piece("tokens", 0.0005))))


def fixed_steps(fixed: float, further: float, began_s: float = 1.0) -> list[MeasuredStep]:
    """Of a machine on which the weights, and each token, take so many times as long."""
    steps = []
    for rows in [16] * 8 + [*range(15, 0, -1)] * 4:
        seconds = fixed * 0.009 + further * rows * 0.0005
        shape = SHAPE._replace(rows=rows, tokens=rows, samples=rows)
        steps.append(MeasuredStep(shape, began_s - 0.001, None, began_s, began_s + seconds))
        began_s += seconds
    return steps


def test_the_speed_of_a_machine_is_told_by_fixed_steps():
    found = speed_of(fixed_steps(0.8, 1.1), TWO_SPEEDS)
    assert found == pytest.approx((0.8, 1.1), rel=1e-3)
    assert str(found) == "x 0.80, 1.10"
    step = fixed_steps(0.8, 1.1)[0]
    assert predicted_s(step, at_speed(TWO_SPEEDS, found)) == pytest.approx(step.seconds)
    assert speed_of(fixed_steps(0.8, 1.1)[:5], TWO_SPEEDS) == Speed()  # too few
    assert mean_of([Speed(0.8, 1.0), Speed(1.0, 1.2)]) == pytest.approx((0.9, 1.1))


def test_fixed_steps_have_all_rows_down_to_one_and_fit_small_servers():
    for slots, count in ((4, 4), (64, 16)):
        (stream,) = reference(slots, 1024).streams
        lengths = [each.num_output_tokens for each in stream.requests]
        assert (stream.concurrency, len(lengths), max(lengths)) == (count, count, 68)
        assert lengths == sorted(set(lengths))


def test_a_load_is_predicted_for_the_speed_before_and_after_it():
    before, after = fixed_steps(0.8, 1.0), fixed_steps(1.0, 1.0, 50.0)
    timings = Timings(
        before + after,
        arrivals={"before-light-0-a": 0.99, "after-light-0-b": 49.99, "light-0-c": 30.0},
        replies={"before-light-3-a": [before[-1].replied_s], "after-light-0-b": [after[-1].replied_s]},
    )
    assert speed_around(Cell("default", "light"), timings, TWO_SPEEDS) == pytest.approx((0.9, 1.0), rel=1e-3)
    assert speed_around(Cell("default", "overload"), timings, TWO_SPEEDS) == Speed()  # nothing tells


def test_a_prediction_is_the_median_of_several_simulations():
    profile, load = create_profile(spread=(0.5, 1.0, 2.0)), create_load(*(0.01 * number for number in range(20)))
    runs = [figures_of(Simulation(config_with(), load, profile, seed).run()) for seed in range(3, 3 + SIMULATIONS)]
    values = sorted(each["ttft_p50_ms"] for each in runs)
    found = predict(config_with(), load, profile, 3)["ttft_p50_ms"]
    assert found == values[SIMULATIONS // 2] != values[0]
