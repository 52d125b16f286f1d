"""Deadlines: a request whose deadline has passed ends with an error, and other requests are unaffected."""

from __future__ import annotations

import pytest
from llm_serving.admission.ttft_predictor import ReplicaSpeed
from llm_serving.core.request import FinishReason
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.timings import HttpTimings
from llm_serving.engine.deadlines import CHECK_INTERVAL_S, MIN_CLEANUP_SIZE, Deadlines, timeout_of
from support.engine_harness import Harness
from support.factories import create_request
from support.fake_runner import expected_output


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def create_timed(deadline, **arguments):
    request = create_request(**arguments)
    request.deadline = deadline
    return request


@pytest.fixture
def deadlines():
    return Deadlines(Harness().scheduler)


def test_requests_expire_in_the_order_of_their_deadlines_and_once(deadlines):
    late, soon = create_timed(9.0), create_timed(3.0)
    for request in (late, soon):
        deadlines.add(request)
    assert deadlines.next == 3.0
    assert deadlines.unscheduled(9) == [soon, late]
    assert deadlines.unscheduled(1) == [soon]
    soon.first_scheduled_time = 1.0
    assert deadlines.unscheduled(1) == [late]
    assert deadlines.pop_expired(2.9) == []
    assert deadlines.pop_expired(3.0) == [soon]
    assert deadlines.pop_expired(99.0) == [late]
    assert (deadlines.next, deadlines.pop_expired(1e9)) == (None, [])


def test_deadlines_of_finished_requests_are_removed():
    harness = Harness()
    deadlines = Deadlines(harness.scheduler)
    for _ in range(10 * MIN_CLEANUP_SIZE):
        request = create_timed(5.0)
        deadlines.add(request)
        harness.scheduler.add(request)
        harness.scheduler.finish(request, FinishReason.ABORT)
    assert len(deadlines.heap) <= MIN_CLEANUP_SIZE + 1
    assert deadlines.next is None
    assert deadlines.pop_expired(9.0) == []


def test_deadlines_accept_a_migrated_request_that_returns_as_another_object(deadlines):
    first, again = (create_timed(5.0, request_id="r") for _ in range(2))
    for request in (create_timed(1.0), first, again, create_timed(5.0)):
        deadlines.add(request)
    assert len(deadlines.pop_expired(9.0)) == 4


def test_newest_deadline_of_a_request_replaces_earlier_ones(deadlines):
    request, other = create_timed(3.0), create_timed(3.0)
    for each in (request, other):
        deadlines.add(each)
    request.deadline = 9.0
    deadlines.add(request)
    other.deadline = None
    assert deadlines.next == 9.0
    assert deadlines.pop_expired(8.0) == []
    assert deadlines.pop_expired(9.0) == [request]
    assert deadlines.next is None


def test_timeout_counts_from_the_receipt_of_the_headers():
    request = create_timed(7.0, arrival_time=3.0)
    assert timeout_of(request) == 4.0
    request.http_timings = HttpTimings(2.0)
    assert timeout_of(request) == 5.0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_request_past_its_deadline_ends_and_others_continue(ahead, num_steps):
    clock = HandClock()
    harness = Harness(ahead=ahead, clock=clock, max_num_seqs=2, num_blocks=16)
    timed = create_timed(105.0, request_id="timed", arrival_time=100.0, max_tokens=40)
    other = create_request(request_id="other", num_prompt_tokens=5, max_tokens=6)
    waiting = create_timed(105.0, request_id="waiting", arrival_time=100.0)
    for request in (timed, other, waiting):
        harness.engine.submit(request)
    for _ in range(num_steps):
        harness.engine.step()
    clock.now = 105.0
    harness.run()
    for request in (timed, waiting):
        last = harness.last(request.request_id)
        assert (last.finish_reason, last.failed) == (FinishReason.TIMEOUT, True)
        assert last.error == "the request did not finish within its time limit of 5 s"
    assert harness.token_ids("other") == expected_output(other.prompt_token_ids, 6)
    assert harness.scheduler.blocks.pool.num_used_blocks == 0
    assert not harness.engine.has_unfinished_requests


def test_beam_search_past_its_deadline_ends_with_all_its_beams():
    clock = HandClock()
    harness = Harness(clock=clock)
    request = create_timed(101.0, request_id="beams", arrival_time=100.0, max_tokens=40, logprobs=0)
    request.beam_search = BeamSearchParams(width=3)
    harness.engine.submit(request)
    for _ in range(6):
        harness.engine.step()
    assert len(harness.scheduler.running) > 1
    clock.now = 102.0
    harness.run()
    assert harness.last("beams").finish_reason is FinishReason.TIMEOUT
    assert harness.scheduler.blocks.pool.num_used_blocks == 0


@pytest.mark.parametrize("form", [None, BeamSearchParams(width=2)])
def test_a_waiting_request_ends_as_soon_as_its_deadline_cannot_be_met(form):
    clock = HandClock()
    harness = Harness(clock=clock, max_num_seqs=1)
    running = create_request(request_id="running", max_tokens=30)
    hopeless = create_timed(104.0, request_id="hopeless", arrival_time=100.0, logprobs=0)
    hopeless.beam_search = form
    hopeful = create_timed(109.0, request_id="hopeful", arrival_time=100.0, max_tokens=4)
    for request in (running, hopeless, hopeful):
        harness.engine.submit(request)
    harness.engine.step()
    assert not hopeless.is_finished
    # A step takes 1 s; one row in four ends, so a slot is free after 4 steps.
    harness.engine.ttft_predictor.speed = ReplicaSpeed(harness.scheduler.limits, 1.0, 0.0, 0.25, 1)
    clock.now += CHECK_INTERVAL_S
    harness.engine.step()
    last = harness.last("hopeless")
    assert last.finish_reason is FinishReason.TIMEOUT
    assert last.error == "the request cannot finish within its time limit of 4 s: its first token is expected in 4.90 s"
    assert not hopeful.is_finished
    harness.run()
    assert harness.token_ids("hopeful") == expected_output(hopeful.prompt_token_ids, 4)
    assert harness.token_ids("running") == expected_output(running.prompt_token_ids, 30)


def test_request_that_meets_its_deadline_is_unaffected():
    clock = HandClock()
    harness = Harness(clock=clock)
    harness.engine.submit(create_timed(200.0, request_id="timed"))
    harness.run()
    clock.now = 300.0
    harness.run()
    assert harness.last("timed").finish_reason is FinishReason.LENGTH


def waiting_behind_one(first, last, **scheduler):
    """Return an engine whose only slot is occupied while `last` waits; `first` has finished; a token takes 1 s."""
    clock = HandClock()
    harness = Harness(clock=clock, max_num_seqs=1, prefix_caching=True, **scheduler)
    harness.engine.submit(first)
    harness.run()
    for request in (create_request(request_id="running", max_tokens=30), last):
        harness.engine.submit(request)
    harness.engine.step()
    harness.engine.ttft_predictor.speed = ReplicaSpeed(harness.scheduler.limits, 0.0, 1.0, 1.0, 1)
    clock.now += CHECK_INTERVAL_S
    harness.engine.step()
    return harness


@pytest.mark.parametrize(("cache_salt", "is_hopeless"), [("", False), ("another", True)])
def test_prefix_cache_hits_count_in_the_prediction_for_a_deadline(cache_salt, is_hopeless):
    last = create_timed(112.0, num_prompt_tokens=20, request_id="last")
    last.cache_salt = cache_salt
    waiting_behind_one(create_request(20, request_id="first", max_tokens=1), last)
    assert last.is_finished == is_hopeless


def test_deadline_prediction_of_a_fork_counts_the_rest_of_its_parents_prompt():
    clock = HandClock()
    harness = Harness(clock=clock, max_num_seqs=2, max_num_batched_tokens=8, max_long_prefill_tokens=8)
    parent = create_request(24, request_id="parent", max_tokens=30)
    fork = create_timed(115.0, num_prompt_tokens=24, request_id="fork", fork_of="parent")
    for request in (parent, fork):
        harness.engine.submit(request)
    harness.engine.step()
    while parent.num_confirmed_tokens < 16:
        harness.engine.step()
    harness.engine.ttft_predictor.speed = ReplicaSpeed(harness.scheduler.limits, 0.0, 0.5, 1.0, 2)
    clock.now = 109.0
    harness.engine.step()
    assert not fork.is_finished
    harness.run()
    assert harness.token_ids("fork") == expected_output(fork.prompt_token_ids, 8)


def test_waiting_request_does_not_expire_early_while_none_runs():
    clock = HandClock()
    harness = Harness(clock=clock)
    harness.engine.ttft_predictor.speed = ReplicaSpeed(harness.scheduler.limits, 0.0, 1.0, None, 8)
    harness.engine.submit(create_timed(102.0, request_id="timed", max_tokens=4))
    harness.run()
    assert harness.token_ids("timed") == expected_output([100, 101, 102, 103], 4)
