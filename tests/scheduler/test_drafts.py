"""Draft tokens in the scheduler: verification, acceptance and rejection."""

from __future__ import annotations

from llm_serving.core.request import FinishReason
from support.factories import create_request, create_scheduler, rows, run_step


def decoding(*requests, **options):
    """Return a scheduler whose requests have their first token, 7."""
    scheduler = create_scheduler(**{"block_size": 16, **options})
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    return scheduler


def test_drafts_are_accepted_up_to_the_first_wrong_token() -> None:
    request = create_request(4)
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [8, 9, 5])
    step = scheduler.schedule(0.0)
    assert rows(step) == [(request.request_id, 4, 4, 4)]
    assert step.rows[0].num_drafts == 3
    assert (request.num_computed_tokens, request.num_tokens_in_flight) == (5, 1)
    assert scheduler.schedule(0.0) is None  # what comes next depends on the reply
    assert scheduler.update(step, [8, 9, 10, 11]) == [request]
    assert (request.output_token_ids, request.num_new_tokens) == ([7, 8, 9, 10], 3)
    assert (request.num_computed_tokens, request.num_confirmed_tokens) == (7, 7)
    assert rows(run_step(scheduler)) == [(request.request_id, 7, 1, 1)]
    scheduler.check_integrity()


def test_a_rejected_draft_costs_its_computation_only() -> None:
    request = create_request(4)
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [8])
    scheduler.update(scheduler.schedule(0.0), [9, 10])
    assert (request.output_token_ids, request.num_new_tokens, request.num_computed_tokens) == ([7, 9], 1, 5)
    assert rows(run_step(scheduler)) == [(request.request_id, 5, 1, 1)]


def test_drafts_without_room_in_their_step_are_dropped() -> None:
    request = create_request(15)
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [7, 7, 7])
    assert rows(run_step(scheduler)) == [(request.request_id, 15, 1, 1)]  # its block is full then
    assert rows(run_step(scheduler)) == [(request.request_id, 16, 1, 1)]


def test_an_end_token_within_an_accepted_draft_ends_the_answer() -> None:
    request = create_request(4, stop_token_ids=frozenset({9}))
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [8, 9, 10])
    scheduler.update(scheduler.schedule(0.0), [8, 9, 10, 11])
    assert request.output_token_ids == [7, 8, 9]
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_a_draft_ends_with_max_tokens() -> None:
    request = create_request(4, max_tokens=3)
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [8, 9, 10])
    step = scheduler.schedule(0.0)
    assert rows(step) == [(request.request_id, 4, 2, 2)]
    scheduler.update(step, [8, 9])
    assert (request.output_token_ids, request.finish_reason) == ([7, 8, 9], FinishReason.LENGTH)


def test_failed_sample_after_an_accepted_draft_token_is_repeated() -> None:
    request = create_request(4)
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [8, 9])
    scheduler.update(scheduler.schedule(0.0), [8, -1, 10])
    assert request.output_token_ids == [7, 8]
    assert rows(scheduler.schedule(0.0)) == [(request.request_id, 5, 1, 1)]


def test_drafts_get_the_budget_that_prompts_and_tokens_leave() -> None:
    first, second = create_request(4, request_id="a"), create_request(4, request_id="b")
    scheduler = decoding(first, second, max_num_batched_tokens=8)
    scheduler.set_draft_tokens(first, [1] * 5)
    scheduler.set_draft_tokens(second, [1] * 5)
    assert rows(scheduler.schedule(0.0)) == [("a", 4, 6, 6), ("b", 4, 2, 2)]


def test_a_step_with_a_prompt_has_no_drafts() -> None:
    request = create_request(4, request_id="a")
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [1, 1])
    scheduler.add(create_request(3, request_id="b"))
    assert rows(scheduler.schedule(0.0)) == [("b", 0, 3, 1), ("a", 4, 1, 1)]


def test_drafts_for_a_request_that_waits_are_dropped() -> None:
    request = create_request(4)
    scheduler = create_scheduler(block_size=16)
    scheduler.add(request)
    scheduler.set_draft_tokens(request, [1])
    step = scheduler.schedule(0.0)
    scheduler.set_draft_tokens(request, [1])
    assert request.draft_token_ids == []
    scheduler.update(step, [7])


def test_accepted_drafts_of_a_preempted_request_count_as_tokens_but_not_in_its_cache() -> None:
    low = create_request(4, request_id="low", priority=1)
    scheduler = decoding(low, max_num_seqs=1)
    scheduler.set_draft_tokens(low, [8, 9])
    step = scheduler.schedule(0.0)
    scheduler.add(create_request(4, request_id="high", priority=-1, max_tokens=1))
    other = scheduler.schedule(0.0)
    assert rows(other) == [("high", 0, 4, 1)]
    scheduler.update(step, [8, 9, 10])
    assert (low.output_token_ids, low.num_computed_tokens) == ([7, 8, 9, 10], 0)
    scheduler.update(other, [7])
    assert rows(run_step(scheduler)) == [("low", 0, 8, 1)]


def test_drafts_are_lost_with_the_cache() -> None:
    request = create_request(4)
    scheduler = decoding(request)
    scheduler.set_draft_tokens(request, [8])
    scheduler.schedule(0.0)
    scheduler.reset_cache()
    assert request.draft_token_ids == []
    assert rows(run_step(scheduler)) == [(request.request_id, 0, 5, 1)]


def test_the_prefix_cache_has_blocks_of_accepted_drafts_only() -> None:
    request = create_request(6, request_id="a")
    scheduler = decoding(request, block_size=8, prefix_caching=True)
    scheduler.set_draft_tokens(request, [8])
    scheduler.update(scheduler.schedule(0.0), [8, 9])  # tokens 6 and 7 of the sequence: 7, 8
    same, other = create_request(6, request_id="b"), create_request(6, request_id="c")
    same.prompt_token_ids += [7, 8, 9]
    other.prompt_token_ids += [7, 9, 9]
    scheduler.add(same)
    scheduler.add(other)
    scheduler.schedule(0.0)
    assert (same.num_cached_tokens, other.num_cached_tokens) == (8, 0)
