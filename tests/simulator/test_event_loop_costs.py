import random

import pytest
from llm_serving_simulator.calibration import EventLoopCosts, fit_event_loop
from llm_serving_simulator.http_player import ClientTiming
from llm_serving_simulator.profile import StepShape
from llm_serving_simulator.recordings import MeasuredStep, Timings

TRUE = EventLoopCosts(request_s=0.002, token_s=0.0001, client_s=0.0006)
TAKE_S = 0.0003


def measured(seed=1):
    """Return steps of 10 ms for up to 60 rows while requests arrive at random; sometimes the loop is late."""
    rng = random.Random(seed)
    timings, seen, free = Timings(), {}, 0.0
    due, events = 0.0, []
    for number in range(300):
        due += rng.expovariate(100)
        events.append((due, f"r-{number}"))
    events += [(0.01 * number, None) for number in range(1, 300)]
    for time, name in sorted(events, key=lambda each: each[0]):
        if name is not None:
            free = max(free, time + TRUE.client_s) + TRUE.request_s
            timings.arrivals[f"{name}-x"] = free
            timings.replies[f"{name}-x"] = []
            seen[name] = ClientTiming(name, time, [])
            continue
        some = [each for each in seen if timings.arrivals[f"{each}-x"] < time][-60:]
        shape = StepShape(len(some), len(some), len(some), 0, 0, 0)
        timings.steps.append(MeasuredStep(shape, time - 0.01, None, time - 0.01, time))
        free = max(free, time + TAKE_S)
        for each in some:
            free += TRUE.token_s
            timings.replies[f"{each}-x"].append(time)
            seen[each].token_times_s.append(free + TRUE.client_s)
    return timings, list(seen.values())


def test_event_loop_fit_separates_costs_of_a_busy_loop():
    timings, seen = measured()
    found = fit_event_loop(timings, seen, lambda step: TAKE_S, EventLoopCosts(0.0008, 0.00003, 0.002))
    assert found == pytest.approx(TRUE, rel=0.1)


def test_event_loop_fit_needs_client_timings():
    assert fit_event_loop(Timings(), [], lambda step: 0.0, TRUE) is None
