import itertools
import random

import pytest
from llm_serving_simulator.virtual_time import SharedInterpreter


def test_interpreter_reservations_wait_for_earlier_ones() -> None:
    interpreter = SharedInterpreter()
    assert interpreter.reserve(0.0, 2.0) == 2.0
    assert interpreter.reserve(1.0, 1.0) == 3.0
    assert interpreter.reserve(5.0, 1.0) == 6.0
    assert interpreter.busy_s == 4.0


def test_interpreter_reservations_fill_free_time_in_pieces() -> None:
    interpreter = SharedInterpreter()
    interpreter.reserve(2.0, 1.0)
    interpreter.reserve(4.0, 1.0)
    assert interpreter.reserve(0.0, 1.0) == 1.0
    assert interpreter.reserve(1.5, 2.0) == 5.5  # half a second before 2, one before 4, half after 5
    assert interpreter.reserve(0.0, 0.75) == 5.75  # from 1 to 1.5, and then after all others


def test_interpreter_reservation_of_0_s_ends_at_once() -> None:
    interpreter = SharedInterpreter()
    interpreter.reserve(0.0, 3.0)
    assert interpreter.reserve(1.0, 0.0) == 1.0


def test_interpreter_forgets_past_reservations_without_effect() -> None:
    kept, forgetful = SharedInterpreter(), SharedInterpreter()
    rng = random.Random(1)
    for step in range(500):
        time = step + 3 * rng.random()
        seconds = rng.random() * 0.8
        forgetful.forget_before(float(step))
        assert forgetful.reserve(time, seconds) == pytest.approx(kept.reserve(time, seconds))


def test_interpreter_reservations_do_not_overlap() -> None:
    interpreter, rng, total, latest = SharedInterpreter(), random.Random(2), 0.0, 0.0
    for _ in range(300):
        time, seconds = rng.random() * 40, rng.random()
        latest = max(latest, interpreter.reserve(time, seconds))
        total += seconds
        spans = list(zip(interpreter._starts, interpreter._ends, strict=True))
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert sum(end - begin for begin, end in spans) == pytest.approx(total)
    assert latest >= total
