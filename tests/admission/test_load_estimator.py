"""Predictions against a server whose steps cost exactly 10 ms and 1 ms a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llm_serving.admission.answer_lengths import AnswerLengths
from llm_serving.admission.load_estimator import MIN_ENDS, MIN_STEPS, LoadEstimator, Measured, Queue, UnderWay
from llm_serving.admission.slots import Slots
from llm_serving.scheduler import SchedulerLimits
from llm_serving.scheduler.schedule import Blocked, WaitReason
from support.factories import create_request

LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_seqs=8, max_model_len=256)


def seconds_of(num_tokens: int) -> float:
    return 0.010 + 0.001 * num_tokens


def slots_of(num_running: int) -> Slots:
    return Slots([create_request() for _ in range(num_running)], AnswerLengths())


def fed(*, num_ended_each: int = 0, num_slots: int | None = None) -> LoadEstimator:
    estimator = LoadEstimator(LIMITS)
    if num_slots is not None:
        estimator.placed(slots_of(num_slots), Blocked("next", "standard", WaitReason.BLOCKS))
    for step in range(MIN_STEPS):
        tokens = 40 if step % 4 == 0 else 4
        estimator.step(
            num_tokens=tokens,
            num_rows=4,
            seconds=seconds_of(tokens),
            num_ended=num_ended_each,
        )
    return estimator


def test_nothing_is_predicted_before_enough_was_measured() -> None:
    estimator = LoadEstimator(LIMITS)
    for _ in range(10 * MIN_STEPS):  # all alike: what a token costs is unknown
        estimator.step(num_tokens=4, num_rows=4, seconds=0.014, num_ended=0)
    assert estimator.measured is None
    estimator = LoadEstimator(LIMITS)
    for step in range(MIN_STEPS - 1):
        estimator.step(num_tokens=40 if step % 2 else 4, num_rows=4, seconds=0.1, num_ended=0)
    assert estimator.measured is None


def test_step_and_token_costs_are_found_and_kept_through_decoding() -> None:
    estimator = fed()
    for _ in range(5000):
        estimator.step(num_tokens=4, num_rows=4, seconds=seconds_of(4), num_ended=0)
    measured = estimator.measured
    assert measured is not None
    assert measured.step_s == pytest.approx(0.010)
    assert measured.token_s == pytest.approx(0.001)


def test_an_idle_server_answers_after_the_steps_of_the_prompt() -> None:
    measured = fed().measured
    assert measured is not None
    assert measured.seconds_to_first_token(Queue(1, 20, 0, 0)) == pytest.approx(seconds_of(20))
    assert measured.seconds_to_first_token(Queue(1, 100, 0, 0)) == pytest.approx(2 * 0.010 + 0.100)


def test_prompts_share_the_budget_with_what_decodes_and_with_prompts_begun_before() -> None:
    measured = fed().measured
    assert measured is not None
    # 90 tokens in what 4 decoding rows leave of 64: two steps, after the one under way.
    queue = Queue(2, 60, 4, 4, under_way=UnderWay((0,), num_left=30))
    assert measured.seconds_to_first_token(queue) == pytest.approx(3 * seconds_of(4) + 0.090)


def test_a_prompt_waits_for_all_steps_that_are_under_way_with_what_they_compute() -> None:
    measured = fed().measured
    assert measured is not None
    for num_tokens, elapsed_s, seconds in (
        ((), 0.0, seconds_of(4 + 8)),
        ((20,), 0.0, seconds_of(4 + 20) + seconds_of(4 + 8)),
        ((20, 30), 0.0, seconds_of(4 + 20) + seconds_of(4 + 30) + seconds_of(4 + 8)),
        ((20, 30), 0.005, seconds_of(4 + 20) - 0.005 + seconds_of(4 + 30) + seconds_of(4 + 8)),
        ((20, 30), 1.0, seconds_of(4 + 30) + seconds_of(4 + 8)),  # as late as it is, it may end now
    ):
        queue = Queue(1, 8, 4, 4, under_way=UnderWay(num_tokens), elapsed_s=elapsed_s)
        assert measured.seconds_to_first_token(queue) == pytest.approx(seconds)


def test_a_step_that_takes_longer_than_expected_has_as_much_before_it_as_others_had() -> None:
    estimator = fed()
    for step in range(400):  # a quarter of them take three times as long as the others
        factor = 3.0 if step % 4 == 0 else 1.0
        estimator.step(num_tokens=4, num_rows=4, seconds=factor * seconds_of(4), num_ended=0)
        estimator.step(num_tokens=40, num_rows=4, seconds=1.5 * seconds_of(40), num_ended=0)
    measured = estimator.measured
    assert measured is not None
    own_s = measured.seconds_to_first_token(Queue(1, 8, 4, 4))
    assert own_s is not None

    def left_s(elapsed_s: float) -> float:
        queue = Queue(1, 8, 4, 4, under_way=UnderWay((0,)), elapsed_s=elapsed_s)
        seconds = measured.seconds_to_first_token(queue)
        assert seconds is not None
        return seconds - own_s

    assert left_s(0.0) == pytest.approx(1.5 * seconds_of(4), rel=0.1)
    # Those that take the short time have ended: what is left is the rest of the long one.
    for elapsed_s in (0.022, 0.03):
        assert left_s(elapsed_s) == pytest.approx(3 * seconds_of(4) - elapsed_s, rel=0.15)
    assert left_s(0.1) == 0.0


def test_steps_that_are_formed_ahead_do_not_see_who_has_ended() -> None:
    waits = Queue(1, 8, 8, 8, num_steps_to_slot=5, under_way=UnderWay((0, 0)))
    for max_steps_in_flight, num_steps in ((1, 6), (2, 7)):
        measured = Measured(replace(LIMITS, max_steps_in_flight=max_steps_in_flight), 1.0, 0.0, None, 8)
        assert measured.seconds_to_first_token(waits) == num_steps


def test_full_slots_wait_for_ends() -> None:
    unknown, known = fed().measured, fed(num_ended_each=1).measured
    assert unknown is not None and known is not None
    full = Queue(3, 30, 8, 8, under_way=UnderWay((0,)))
    assert MIN_STEPS > MIN_ENDS
    assert unknown.seconds_to_first_token(full) is None
    # Of 4 rows a step one ended, so of 8 two end: three requests take two steps, one more for the prompt.
    assert known.seconds_to_first_token(full) == pytest.approx((2 + 1) * seconds_of(8) + 0.030)
    # Who may displace all that run does not wait for ends.
    displacing = Queue(3, 30, 0, 8, under_way=UnderWay((0,)))
    assert known.seconds_to_first_token(displacing) == pytest.approx(2 * seconds_of(8) + 0.030)


def test_a_full_cache_counts_as_full_slots() -> None:
    measured = fed(num_slots=4).measured
    assert measured is not None
    assert measured.seconds_to_first_token(Queue(1, 8, 4, 4)) is None


def test_the_cache_is_the_limit_only_where_the_scheduler_says_so() -> None:
    """After an end fewer run, though one more may: that is no full cache."""
    estimator = fed(num_slots=4)
    for reason, num_running, num_slots in (
        (WaitReason.DECODING, 3, 4),  # nobody was looked at
        (WaitReason.BLOCKS, 5, 5),
        (None, 3, 5),  # one has ended
        (WaitReason.SLOTS, 7, LIMITS.max_num_seqs),
        (None, 6, LIMITS.max_num_seqs),
    ):
        estimator.placed(slots_of(num_running), None if reason is None else Blocked("next", "standard", reason))
        estimator.step(num_tokens=4, num_rows=4, seconds=seconds_of(4), num_ended=0)
        assert estimator.measured is not None and estimator.measured.num_slots == num_slots
        assert estimator.slots is not None and len(estimator.slots) == num_running


def test_blocks_that_were_short_once_are_not_taken_for_short_where_there_is_room() -> None:
    estimator = fed(num_slots=3)
    assert estimator.measured is not None
    assert estimator.measured.num_slots == 3
    estimator.placed(slots_of(3))
    estimator.step(num_tokens=3, num_rows=3, seconds=seconds_of(3), num_ended=0)
    assert estimator.measured.num_slots == 3
    estimator.placed(slots_of(3))
    estimator.has_room()
    estimator.step(num_tokens=3, num_rows=3, seconds=seconds_of(3), num_ended=0)
    assert estimator.measured.num_slots == LIMITS.max_num_seqs


def test_the_cache_has_room_for_as_many_as_run_and_places_are_no_more_than_the_limit() -> None:
    estimator = fed(num_slots=3)
    estimator.placed(slots_of(5))
    estimator.step(num_tokens=5, num_rows=5, seconds=seconds_of(5), num_ended=0)
    assert estimator.measured is not None
    assert estimator.measured.num_slots == 5
    estimator.limits = replace(LIMITS, max_num_seqs=2)
    estimator.step(num_tokens=5, num_rows=5, seconds=seconds_of(5), num_ended=0)
    assert estimator.measured.num_slots == 2


def test_answers_that_are_long_one_after_the_other_make_no_wait_longer_than_any_may_be() -> None:
    estimator = fed(num_ended_each=1)
    for _ in range(100 * LIMITS.max_model_len):
        estimator.step(num_tokens=8, num_rows=8, seconds=seconds_of(8), num_ended=0)
    measured = estimator.measured
    assert measured is not None
    seconds = measured.seconds_to_first_token(Queue(1, 8, 8, 8))
    assert seconds is not None
    assert seconds <= (LIMITS.max_model_len + 2) * seconds_of(8)
