import numpy as np
import pytest
from llm_serving.errors import RecordingError
from llm_serving_simulator.calibration import calibrate
from llm_serving_simulator.http_player import ClientTiming
from llm_serving_simulator.profile import CostModel, CostTerm, StepShape
from llm_serving_simulator.recordings import MeasuredStep, Timings

STEP = CostModel((CostTerm("step", 0.002), CostTerm("rows", 0.0001)))
TAKE_S, FORM_S, WAKE_S, REQUEST_S, TOKEN_S, CLIENT_S = 0.0003, 0.0008, 0.0001, 0.001, 0.00002, 0.0004


@pytest.fixture
def timings():
    """Return timings of a server with exactly these costs; every tenth step is scheduled on an idle device."""
    timings, before = Timings(num_blocks=7), 10.0
    for number in range(400):
        rows = 1 + number % 7
        is_idle = number % 10 == 0
        asked = before + 1.0 if is_idle else before - 0.001
        replied = (asked + FORM_S if is_idle else before) + STEP.seconds(shape := StepShape(rows, rows, rows, 99, 0, 0))
        step = MeasuredStep(shape, asked, asked - WAKE_S if is_idle else None, before, replied, replied + TAKE_S)
        timings.steps.append(step)
        before = replied
        name = f"play-{number}-abcd"
        timings.arrivals[name] = asked - WAKE_S
        timings.replies[name] = [replied]
    return timings


@pytest.fixture
def seen(timings):
    return [
        ClientTiming(
            f"play-{number}",
            step.scheduled_s - WAKE_S - REQUEST_S - CLIENT_S,
            [step.reply_s + TAKE_S + TOKEN_S + CLIENT_S],
        )
        for number, step in enumerate(timings.steps)
    ]


def test_calibration_finds_the_costs_of_a_server(timings, seen):
    profile = calibrate(timings, [seen], name="n", source="s").profile
    shape = StepShape(5, 5, 5, 99, 0, 0)
    assert profile.step.seconds(shape) == pytest.approx(STEP.seconds(shape), rel=1e-3)
    assert profile.take.seconds(shape) == pytest.approx(TAKE_S, rel=1e-3)
    assert profile.form.seconds(shape) == pytest.approx(FORM_S, rel=0.02)
    assert profile.wake_s == pytest.approx(WAKE_S, rel=0.02)
    assert min(profile.request_s, profile.token_s, profile.client_s) > 0
    assert (profile.measured, profile.num_blocks) == (True, 7)
    assert profile.notes["step_error_p95"] < 0.01


def test_calibration_accepts_steps_without_immediate_successors(timings):
    for step in timings.steps:
        step.next_schedule_s = None
    profile = calibrate(timings, name="n", source="s").profile
    shape = StepShape(5, 5, 5, 99, 0, 0)
    assert profile.take.seconds(shape) == 0.0
    assert profile.step.seconds(shape) == pytest.approx(STEP.seconds(shape), rel=0.01)


def test_calibration_measures_the_cost_of_draft_tokens():
    """Steps of two rows that verify up to eight draft tokens each, and steps of more rows without drafts."""
    true = CostModel((CostTerm("step", 0.01), CostTerm("rows", 0.0005), CostTerm("tokens", 0.00002)))
    rng, timings, before = np.random.default_rng(1), Timings(num_blocks=7), 10.0
    for number in range(600):
        has_drafts = number % 3 == 0
        rows = 2 if has_drafts else int(rng.integers(1, 9))
        tokens = rows + int(rng.integers(1, 17)) if has_drafts else rows
        asked = before + TAKE_S if has_drafts else before - 0.001
        shape = StepShape(rows, tokens, tokens, 99, 9 * tokens if has_drafts else 0, 0)
        replied = (asked + FORM_S if has_drafts else before) + true.seconds(shape)
        timings.steps.append(MeasuredStep(shape, asked, None, before, replied, replied + TAKE_S))
        before = replied
    found = calibrate(timings, name="n", source="s")
    profile, shape = found.profile, StepShape(2, 14, 14, 99, 126, 0)
    assert profile.step.seconds(shape) == pytest.approx(true.seconds(shape), rel=0.01)
    assert profile.form.seconds(shape) == pytest.approx(FORM_S, rel=0.1)
    num_held_out = sum(shape.samples > shape.rows for shape, _ in found.step.tested)
    assert profile.notes["draft_steps_held_out"] == num_held_out > 20
    assert profile.notes["draft_steps_error_median"] < 0.01


def test_calibration_without_scheduling_ahead_includes_scheduling_in_steps(timings):
    timings.steps = [each for each in timings.steps if each.arrival_s is None]
    for step in timings.steps:
        step.scheduled_s = step.previous_reply_s + TAKE_S
    profile = calibrate(timings, name="n", source="s").profile
    shape = StepShape(5, 5, 5, 99, 0, 0)
    assert profile.form.seconds(shape) == 0.0
    assert profile.step.seconds(shape) == pytest.approx(STEP.seconds(shape) - TAKE_S, rel=0.05)


def test_calibration_takes_the_idle_delay_from_clients(timings, seen):
    later = [each._replace(token_times_s=[time + 0.002 for time in each.token_times_s]) for each in seen[::10]]
    usual = calibrate(timings, [[each] for each in seen], name="n", source="s").profile.idle_s
    ahead = [each for number, each in enumerate(seen) if number % 10]
    found = calibrate(timings, [[each] for each in [*ahead, *later]], name="n", source="s").profile.idle_s
    assert found > usual + 0.001


def test_calibration_separates_event_loop_work_from_steps():
    """Requests arrive and tokens are sent at random times; both slow the running step down."""
    true = CostModel((*STEP.terms, CostTerm("sent", 0.00005), CostTerm("read", 0.001)))
    rng, timings, before = np.random.default_rng(1), Timings(num_blocks=7), 10.0
    for _ in range(600):
        rows, sent, read = (int(rng.integers(low, high)) for low, high in ((1, 60), (0, 60), (0, 3)))
        replied = before + true.seconds(shape := StepShape(rows, rows, rows, 99, 0, 0, sent, read))
        timings.steps.append(MeasuredStep(shape, before - 0.001, None, before, replied, replied + TAKE_S))
        before = replied
    found = {each.of: each.seconds for each in calibrate(timings, name="n", source="s").profile.step.terms}
    assert (found["sent"], found["read"]) == pytest.approx((0.00005, 0.001), rel=0.01)


def test_calibration_without_clients_has_no_event_loop_costs(timings):
    profile = calibrate(timings, name="n", source="s").profile
    assert (profile.request_s, profile.token_s, profile.client_s) == (0.0, 0.0, 0.0)


def test_calibration_needs_enough_steps():
    with pytest.raises(RecordingError, match="at least 50 steps"):
        calibrate(Timings(), name="n", source="s")
