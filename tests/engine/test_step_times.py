"""Times of steps, one at a time and one ahead."""

import pytest
from llm_serving.engine.load_reports import STEP_MEMORY, StepTimes


def test_one_at_a_time_the_master_s_part_is_no_part_of_what_is_computed():
    times = StepTimes()
    times.record_submitted(1.0, 1.25, follows=False)
    times.record_reply(3.25)
    times.record_updated(3.5)
    times.record_published(4.25)
    assert (times.computed_s, times.step_s, times.mean_s) == (2.0, 2.5, 2.5)
    times.record_submitted(4.25, 4.75, follows=False)
    assert (times.host_s, times.began) == (1.5, 4.25)


def test_one_ahead_a_step_begins_when_the_one_before_it_was_replied_to():
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
