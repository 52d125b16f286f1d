"""TTFT predictions for a replica whose steps cost exactly 10 ms and 1 ms a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llm_serving.admission.ttft_predictor import (
    MIN_FINISHED,
    MIN_STEPS,
    InFlightSteps,
    QueueAhead,
    ReplicaSpeed,
    TtftPredictor,
)
from llm_serving.scheduler import SchedulerLimits
from llm_serving.scheduler.schedule import Blocked, WaitReason

LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=8, max_prefill_seqs=8, max_model_len=256)


def seconds_of(num_tokens: int) -> float:
    return 0.010 + 0.001 * num_tokens


def decode(predictor: TtftPredictor, num_rows: int) -> None:
    predictor.record_step(num_tokens=num_rows, num_rows=num_rows, seconds=seconds_of(num_rows), num_finished=0)


def fed(*, num_finished_each: int = 0, num_slots: int | None = None) -> TtftPredictor:
    predictor = TtftPredictor(LIMITS)
    if num_slots is not None:
        predictor.record_running(num_slots, Blocked("next", "standard", WaitReason.BLOCKS))
    for step in range(MIN_STEPS):
        tokens = 40 if step % 4 == 0 else 4
        predictor.record_step(num_tokens=tokens, num_rows=4, seconds=seconds_of(tokens), num_finished=num_finished_each)
    return predictor


def speed_of(predictor: TtftPredictor) -> ReplicaSpeed:
    assert predictor.speed is not None
    return predictor.speed


def test_predictor_predicts_nothing_before_enough_steps_were_measured() -> None:
    predictor = TtftPredictor(LIMITS)
    for _ in range(10 * MIN_STEPS):  # all alike, so the cost of a token is unknown
        decode(predictor, 4)
    assert predictor.speed is None
    predictor = TtftPredictor(LIMITS)
    for step in range(MIN_STEPS - 1):
        predictor.record_step(num_tokens=40 if step % 2 else 4, num_rows=4, seconds=0.1, num_finished=0)
    assert predictor.speed is None


def test_predictor_keeps_step_and_token_costs_through_long_decoding() -> None:
    predictor = fed()
    for _ in range(5000):
        decode(predictor, 4)
    speed = speed_of(predictor)
    assert speed.step_s == pytest.approx(0.010)
    assert speed.token_s == pytest.approx(0.001)


def test_predicted_ttft_of_an_idle_replica_is_the_steps_of_the_prompt() -> None:
    speed = speed_of(fed())
    assert speed.seconds_to_first_token(QueueAhead(1, 20, 0, 0)) == pytest.approx(seconds_of(20))
    assert speed.seconds_to_first_token(QueueAhead(1, 100, 0, 0)) == pytest.approx(2 * 0.010 + 0.100)


def test_predicted_ttft_includes_decoding_and_unfinished_prompts() -> None:
    # 90 tokens in what 4 decoding rows leave of 64: two steps, after the one in flight.
    queue = QueueAhead(2, 60, 4, 4, InFlightSteps(1, 0, 30))
    assert speed_of(fed()).seconds_to_first_token(queue) == pytest.approx(3 * seconds_of(4) + 0.090)


def test_predicted_ttft_includes_the_steps_in_flight() -> None:
    speed = speed_of(fed())
    for in_flight, elapsed_s, seconds in (
        (InFlightSteps(), 0.0, seconds_of(4 + 8)),
        (InFlightSteps(1, 20), 0.0, seconds_of(4 + 20) + seconds_of(4 + 8)),
        (InFlightSteps(2, 50), 0.0, seconds_of(4 + 20) + seconds_of(4 + 30) + seconds_of(4 + 8)),
        (InFlightSteps(2, 50), 0.005, seconds_of(4 + 20) - 0.005 + seconds_of(4 + 30) + seconds_of(4 + 8)),
        (InFlightSteps(2, 50), 1.0, seconds_of(4 + 25) + seconds_of(4 + 8)),  # late, so it may return any moment
    ):
        queue = QueueAhead(1, 8, 4, 4, in_flight, elapsed_s)
        assert speed.seconds_to_first_token(queue) == pytest.approx(seconds)


def test_predicted_ttft_includes_steps_scheduled_ahead() -> None:
    queue = QueueAhead(1, 8, 8, 8, InFlightSteps(2))
    for max_steps_in_flight, num_steps in ((1, 6), (2, 7)):
        limits = replace(LIMITS, max_steps_in_flight=max_steps_in_flight)
        speed = ReplicaSpeed(limits, 1.0, 0.0, 1 / (5 * 8), 8)
        assert speed.seconds_to_first_token(queue) == num_steps


def test_predicted_ttft_with_full_slots_includes_the_wait_for_one() -> None:
    unknown, known = speed_of(fed()), speed_of(fed(num_finished_each=1))
    full = QueueAhead(3, 30, 8, 8, InFlightSteps(1))
    assert MIN_STEPS > MIN_FINISHED
    assert unknown.seconds_to_first_token(full) is None
    # One of 4 rows finished in each step, so of 8 rows two do: three requests take two steps, one more for the prompt.
    assert known.seconds_to_first_token(full) == pytest.approx((2 + 1) * seconds_of(8) + 0.030)
    # A request that may preempt all running ones waits for none of them.
    preempting = QueueAhead(3, 30, 0, 8, InFlightSteps(1))
    assert known.seconds_to_first_token(preempting) == pytest.approx(2 * seconds_of(8) + 0.030)


def test_predicted_ttft_of_a_limited_tenant_depends_on_its_own_requests() -> None:
    speed = ReplicaSpeed(LIMITS, 1.0, 0.0, 0.1, 8)
    queue = QueueAhead(1, 8, 2, 2, num_finishes=3, tenant_slots=2)
    assert speed.seconds_to_first_token(queue) == 3 / (2 * 0.1) + LIMITS.max_steps_in_flight
    assert speed.seconds_to_first_token(replace(queue, num_finishes=0)) == 1


def test_predictor_treats_a_full_cache_as_full_slots() -> None:
    assert speed_of(fed(num_slots=4)).seconds_to_first_token(QueueAhead(1, 8, 4, 4)) is None


def test_predictor_counts_the_cache_as_the_limit_only_while_blocks_are_missing() -> None:
    """After a request finished fewer run although one more may: the cache is not full."""
    predictor = fed(num_slots=4)
    for reason, num_running, num_slots in (
        (WaitReason.DECODING, 3, 4),  # the scheduler considered no waiting request
        (WaitReason.BLOCKS, 5, 5),
        (None, 3, 5),  # a request has finished
        (WaitReason.SLOTS, 7, LIMITS.max_num_seqs),
        (None, 6, LIMITS.max_num_seqs),
    ):
        predictor.record_running(num_running, None if reason is None else Blocked("next", "standard", reason))
        decode(predictor, 4)
        assert speed_of(predictor).num_slots == num_slots


def test_predictor_ignores_a_cache_with_free_blocks() -> None:
    predictor = fed(num_slots=3)
    assert speed_of(predictor).num_slots == 3
    predictor.record_running(3)
    decode(predictor, 3)
    assert speed_of(predictor).num_slots == 3
    predictor.record_running(3, has_room=True)
    decode(predictor, 3)
    assert speed_of(predictor).num_slots == LIMITS.max_num_seqs


def test_predictor_bounds_slots_by_running_requests_and_the_limit() -> None:
    predictor = fed(num_slots=3)
    predictor.record_running(5)
    decode(predictor, 5)
    assert speed_of(predictor).num_slots == 5
    predictor.limits = replace(LIMITS, max_num_seqs=2)
    decode(predictor, 5)
    assert speed_of(predictor).num_slots == 2


def test_predicted_wait_for_a_slot_never_exceeds_the_longest_request() -> None:
    predictor = fed(num_finished_each=1)
    for _ in range(100 * LIMITS.max_model_len):
        decode(predictor, 8)
    seconds = speed_of(predictor).seconds_to_first_token(QueueAhead(1, 8, 8, 8))
    assert seconds is not None
    assert seconds <= (LIMITS.max_model_len + 2) * seconds_of(8)
