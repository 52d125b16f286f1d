"""Step times without and with a step scheduled ahead."""

import pytest
from llm_serving.engine.observers import STEP_MEMORY, StepTimes


def test_step_times_without_lookahead_exclude_the_master_s_time():
    times = StepTimes()
    times.record_submitted(1.0, 1.25, follows=False)
    times.record_reply(3.25)
    times.record_updated(3.5)
    times.record_published(4.25)
    assert (times.computed_s, times.step_s, times.mean_s) == (2.0, 2.5, 2.5)
    times.record_submitted(4.25, 4.75, follows=False)
    assert (times.host_s, times.began) == (1.5, 4.25)


def test_step_times_with_lookahead_begin_at_the_reply_before():
    times = StepTimes()
    times.record_submitted(0.0, 0.0, follows=False)
    times.record_submitted(0.5, 0.75, follows=True)
    assert (times.began, times.host_s) == (0.0, 0.25)
    times.record_reply(2.0)
    times.record_updated(2.0)
    times.record_published(2.0)
    times.record_reply(5.0)
    times.record_updated(5.5)
    assert (times.computed_s, times.step_s, times.began) == (3.0, 3.5, 5.5)
    assert times.mean_s == pytest.approx(2.0 + 1.5 / STEP_MEMORY)
