from dataclasses import replace

import pytest
from llm_serving.core.request import FinishReason, RequestStatus
from support.factories import create_request, create_scheduler, rows, run_step


def test_prompt_is_computed_whole_then_one_token_a_step() -> None:
    scheduler = create_scheduler()
    scheduler.add(create_request(5, request_id="a", max_tokens=3))
    assert rows(run_step(scheduler)) == [("a", 0, 5, True)]
    assert rows(run_step(scheduler)) == [("a", 5, 1, True)]
    assert rows(run_step(scheduler)) == [("a", 6, 1, True)]
    assert run_step(scheduler) is None
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_requests_start_and_finish_between_steps() -> None:
    scheduler = create_scheduler()
    scheduler.add(create_request(4, request_id="a", max_tokens=2))
    run_step(scheduler)
    scheduler.add(create_request(4, request_id="b", max_tokens=2))
    assert rows(run_step(scheduler)) == [("b", 0, 4, True), ("a", 4, 1, True)]
    assert rows(run_step(scheduler)) == [("b", 4, 1, True)]


def test_long_prompt_is_cut_to_the_token_budget() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=8)
    scheduler.add(create_request(20, request_id="a"))
    assert rows(run_step(scheduler)) == [("a", 0, 8, False)]
    assert rows(run_step(scheduler)) == [("a", 8, 8, False)]
    assert rows(run_step(scheduler)) == [("a", 16, 4, True)]


def test_several_prompts_share_a_step() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=10)
    for name in "abc":
        scheduler.add(create_request(4, request_id=name))
    assert rows(run_step(scheduler)) == [("a", 0, 4, True), ("b", 0, 4, True), ("c", 0, 2, False)]


def test_at_most_max_prefill_seqs_prompts_in_a_step() -> None:
    scheduler = create_scheduler(max_prefill_seqs=1)
    for name in "ab":
        scheduler.add(create_request(4, request_id=name))
    assert rows(run_step(scheduler)) == [("a", 0, 4, True)]
    assert rows(run_step(scheduler)) == [("b", 0, 4, True), ("a", 4, 1, True)]


def test_at_most_max_num_seqs_run() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    scheduler.add(create_request(4, request_id="a", max_tokens=2))
    scheduler.add(create_request(4, request_id="b", max_tokens=2))
    run_step(scheduler)
    assert rows(run_step(scheduler)) == [("a", 4, 1, True)]
    assert rows(run_step(scheduler)) == [("b", 0, 4, True)]


def test_smaller_priority_is_admitted_first() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    scheduler.add(create_request(request_id="low", priority=1))
    scheduler.add(create_request(request_id="high", priority=0))
    assert rows(run_step(scheduler))[0][0] == "high"


def test_long_prompt_does_not_delay_a_higher_class() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=16)
    scheduler.add(create_request(100, request_id="low", priority=1))
    assert rows(run_step(scheduler)) == [("low", 0, 16, False)]
    scheduler.add(create_request(8, request_id="high", priority=0))
    assert rows(run_step(scheduler)) == [("high", 0, 8, True), ("low", 16, 8, False)]


def test_long_prompt_is_not_delayed_by_later_prompts_of_its_class() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=16)
    scheduler.add(create_request(40, request_id="first"))
    run_step(scheduler)
    scheduler.add(create_request(8, request_id="later"))
    assert rows(run_step(scheduler)) == [("first", 16, 16, False)]
    assert rows(run_step(scheduler)) == [("first", 32, 8, True), ("later", 0, 8, True)]


def test_decoding_is_left_out_of_at_most_max_decode_gap_steps() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=8, max_decode_gap=2, num_blocks=200)
    scheduler.add(create_request(4, request_id="running", max_tokens=50))
    run_step(scheduler)
    for name in "abcdefg":
        scheduler.add(create_request(8, request_id=name, max_tokens=50))
    schedules = [run_step(scheduler) for _ in range(9)]
    decoded = [any(row[0] == "running" for row in rows(schedule)) for schedule in schedules]
    assert decoded == [False, False, True, False, False, True, False, False, True]
    assert all(schedule is not None and schedule.num_bound_violations == 0 for schedule in schedules)


def test_fcfs_policy_decodes_before_it_admits() -> None:
    scheduler = create_scheduler(policy="fcfs", max_num_batched_tokens=8)
    scheduler.add(create_request(4, request_id="a", priority=5))
    run_step(scheduler)
    scheduler.add(create_request(8, request_id="b", priority=0))
    assert rows(run_step(scheduler)) == [("a", 4, 1, True), ("b", 0, 7, False)]


def test_scheduler_preempts_the_last_request_for_blocks_and_recomputes_it() -> None:
    scheduler = create_scheduler(num_blocks=4, block_size=4)
    old = create_request(4, request_id="old", max_tokens=9)
    young = create_request(4, request_id="young", max_tokens=3)
    scheduler.add(old)
    scheduler.add(young)
    assert rows(run_step(scheduler)) == [("old", 0, 4, True), ("young", 0, 4, True)]
    assert rows(run_step(scheduler)) == [("old", 4, 1, True), ("young", 4, 1, True)]
    young.sampling = replace(young.sampling, max_tokens=20)
    for _ in range(3):
        run_step(scheduler)
    # Both have filled two blocks, and there are four: the older one's ninth token takes the younger one's.
    assert rows(run_step(scheduler)) == [("old", 8, 1, True)]
    assert (young.status, young.num_computed_tokens, young.num_preemptions) == (RequestStatus.WAITING, 0, 1)
    while not old.is_finished:
        run_step(scheduler)
    assert rows(run_step(scheduler)) == [("young", 0, 9, True)]


def test_admission_leaves_one_block_for_each_running_request() -> None:
    scheduler = create_scheduler(num_blocks=3, block_size=4)
    scheduler.add(create_request(4, request_id="a"))
    scheduler.add(create_request(8, request_id="b"))
    assert rows(run_step(scheduler)) == [("a", 0, 4, True)]


def test_schedule_ahead_counts_tokens_in_flight() -> None:
    scheduler = create_scheduler()
    request = create_request(4, request_id="a", max_tokens=3)
    scheduler.add(request)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert rows(first) == [("a", 0, 4, True)]
    assert rows(second) == [("a", 4, 1, True)]
    assert (request.num_tokens_known, request.num_tokens) == (4, 6)
    assert first is not None and scheduler.update(first, [11]) == [request]
    assert (request.output_token_ids, request.num_tokens) == ([11], 6)
    third = scheduler.schedule(0.0)
    assert rows(third) == [("a", 5, 1, True)]
    assert scheduler.schedule(0.0) is None, "the length limit is known before the tokens are"


def test_token_sampled_after_the_end_is_dropped() -> None:
    scheduler = create_scheduler()
    request = create_request(4, stop_token_ids=frozenset({2}))
    scheduler.add(request)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None and second is not None
    assert scheduler.update(first, [2]) == [request]
    assert request.finish_reason is FinishReason.STOP
    assert scheduler.update(second, [9]) == []
    assert request.output_token_ids == [2]
    scheduler.check_integrity()
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_preempted_request_waits_for_its_token_in_flight() -> None:
    scheduler = create_scheduler(num_blocks=8)
    request = create_request(4, request_id="a")
    scheduler.add(request)
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert first is not None and second is not None
    scheduler._preemptor.preempt(request, _DiscardingStep(), request)  # type: ignore[arg-type]
    assert scheduler.schedule(0.0) is None
    scheduler.update(first, [11])
    assert scheduler.schedule(0.0) is None
    scheduler.update(second, [12])
    assert rows(scheduler.schedule(0.0)) == [("a", 0, 6, True)]
    assert request.output_token_ids == [11, 12]


class _DiscardingStep:
    def remove_row(self, request: object) -> None:
        del request


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.RUNNING])
def test_request_can_finish_in_every_state(status: RequestStatus) -> None:
    scheduler = create_scheduler()
    request = create_request(4)
    scheduler.add(request)
    if status is RequestStatus.RUNNING:
        run_step(scheduler)
    assert request.status is status
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.finish(request, FinishReason.LENGTH)
    assert request.finish_reason is FinishReason.ABORT
    scheduler.check_integrity()
    assert not scheduler.has_unfinished_requests
    assert run_step(scheduler) is None


def test_static_batching_admits_nothing_until_the_batch_has_ended() -> None:
    scheduler = create_scheduler(static_batching=True, max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 1)):
        scheduler.add(create_request(4, request_id=name, max_tokens=max_tokens))
    steps = [[row[0] for row in rows(run_step(scheduler))] for _ in range(4)]
    assert steps == [["a", "b"], ["b"], ["b"], ["c"]]


def test_request_admitted_without_a_row_counts_as_run() -> None:
    scheduler = create_scheduler(static_batching=True, max_num_batched_tokens=8, max_num_seqs=2)
    first, second = create_request(8), create_request(8)
    scheduler.add(first)
    scheduler.add(second)
    bound = second.wait_bound
    schedule = scheduler.schedule(0.0)
    assert schedule is not None and [row.request for row in schedule.rows] == [first]
    assert second in scheduler.running and second.has_run
    scheduler.reset_cache()
    assert second.wait_bound == bound, "its bound was kept already"


def test_static_batch_is_prefilled_over_several_steps() -> None:
    scheduler = create_scheduler(static_batching=True, max_num_batched_tokens=8, max_num_seqs=2)
    for name in "ab":
        scheduler.add(create_request(8, request_id=name, max_tokens=2))
    assert rows(run_step(scheduler)) == [("a", 0, 8, True)]
    assert rows(run_step(scheduler)) == [("b", 0, 8, True)]


def test_static_batch_waits_to_fill_until_its_timeout() -> None:
    scheduler = create_scheduler(static_batching=True, max_num_seqs=2, batch_waiting_time=1.0)
    scheduler.add(create_request(4, request_id="a", arrival_time=10.0))
    assert scheduler.schedule(10.5) is None
    assert rows(scheduler.schedule(11.0)) == [("a", 0, 4, True)]


def test_full_static_batch_starts_at_once() -> None:
    scheduler = create_scheduler(static_batching=True, max_num_seqs=2, batch_waiting_time=1.0)
    for name in "ab":
        scheduler.add(create_request(4, request_id=name, arrival_time=10.0))
    assert len(rows(scheduler.schedule(10.0))) == 2
