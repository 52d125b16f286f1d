"""Preemption: only by strictly higher classes, only if it makes room, and never of protected requests."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.core.request import Request, RequestStatus
from llm_serving.scheduler import Scheduler
from support.factories import create_classes, create_request, create_scheduler, rows, run_step
from support.scheduler_run import SchedulerRun


def start(scheduler: Scheduler, *requests: Request) -> None:
    """Run the requests, in this order, until each has a token."""
    for request in requests:
        scheduler.add(request)
        run_step(scheduler)
    assert all(request.status is RequestStatus.RUNNING for request in requests)


def is_preempted(request: Request) -> bool:
    return request.status is RequestStatus.WAITING and request.num_preemptions == 1


@pytest.mark.parametrize(("priority", "preempted"), [(-1, True), (0, False), (1, False)])
def test_only_a_strictly_higher_class_preempts(priority: int, preempted: bool) -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    running = create_request(request_id="running", max_tokens=20)
    start(scheduler, running)
    scheduler.add(create_request(request_id="new", priority=priority))
    names = [name for name, *_ in rows(run_step(scheduler))]
    assert names == (["new"] if preempted else ["running"])
    assert is_preempted(running) is preempted


def test_priorities_within_a_class_preempt_no_request() -> None:
    classes = create_classes()[1:2]
    scheduler = create_scheduler(max_num_seqs=1, classes=classes)
    running = create_request(max_tokens=20, priority=5)
    start(scheduler, running)
    scheduler.add(create_request(priority=0))
    run_step(scheduler)
    assert running.status is RequestStatus.RUNNING


def test_scheduler_preempts_the_last_request_for_a_slot() -> None:
    scheduler = create_scheduler(max_num_seqs=3)
    requests = [create_request(priority=priority, max_tokens=20) for priority in (0, 1, 1)]
    start(scheduler, *requests)
    scheduler.add(create_request(priority=-1))
    run_step(scheduler)
    assert [is_preempted(request) for request in requests] == [False, False, True]


def test_scheduler_preempts_no_more_requests_than_blocks_require() -> None:
    scheduler = create_scheduler(num_blocks=12)
    small, large, tiny = (create_request(size, priority=1, max_tokens=9) for size in (6, 22, 2))
    start(scheduler, small, large, tiny)
    high = create_request(14, priority=-1)
    scheduler.add(high)
    run_step(scheduler)
    assert [is_preempted(request) for request in (small, large, tiny)] == [False, True, False]
    assert high.status is RequestStatus.RUNNING


def test_scheduler_preempts_no_request_if_it_does_not_make_room() -> None:
    scheduler = create_scheduler(num_blocks=12)
    high, low = create_request(20, priority=-1, max_tokens=9), create_request(6, priority=1, max_tokens=9)
    start(scheduler, high, low)
    scheduler.add(create_request(30, priority=-1))
    run_step(scheduler)
    assert low.status is RequestStatus.RUNNING
    assert low.num_preemptions == 0


def test_blocks_shared_with_a_victim_are_not_counted_twice() -> None:
    """Preempting the victim frees only blocks that the new request shares with it, so it still lacks one."""
    scheduler = create_scheduler(num_blocks=5, prefix_caching=True)
    other, low = create_request(8, priority=-1), create_request(8, priority=1)
    other.prompt_token_ids = list(range(8))
    start(scheduler, other, low)
    assert scheduler.blocks.pool.num_free_blocks == 0
    high = create_request(12, priority=-1)
    scheduler.add(high)
    assert scheduler.blocks.num_blocks_to_admit(high, 12) == 1
    run_step(scheduler)
    assert high.status is RequestStatus.WAITING


def test_preempted_request_waits_ahead_of_its_class() -> None:
    scheduler = create_scheduler(max_num_seqs=1)
    preempted = create_request(request_id="preempted", max_tokens=20)
    start(scheduler, preempted)
    scheduler.add(create_request(request_id="earlier key", max_tokens=1))
    scheduler.waiting.queues["normal"].peek().queue_key = (0, -5, -5)  # type: ignore[union-attr]
    scheduler.add(create_request(request_id="high", priority=-1, max_tokens=1))
    names = [rows(run_step(scheduler))[0][0] for _ in range(2)]
    assert names == ["high", "preempted"]


def test_request_keeps_its_slot_after_max_preemptions() -> None:
    scheduler = create_scheduler(max_num_seqs=1, max_preemptions=1)
    low = create_request(4, priority=1, max_tokens=20)
    start(scheduler, low)
    scheduler.add(create_request(priority=-1, max_tokens=1))
    run_step(scheduler)
    assert is_preempted(low)
    run_step(scheduler)
    assert low.status is RequestStatus.RUNNING
    assert scheduler.blocks.num_blocks_held(low.request_id) == 6  # 24 tokens
    scheduler.add(create_request(priority=-1, max_tokens=1))
    run_step(scheduler)
    assert low.status is RequestStatus.RUNNING


def test_request_within_the_share_of_its_class_is_not_preempted() -> None:
    """Otherwise a share would be worthless: the waiting class would take the slot back at once."""
    scheduler = create_scheduler(max_num_seqs=1, classes=create_classes(ageing_steps=3))
    run = SchedulerRun(scheduler)
    low = create_request(priority=1, max_tokens=8)
    run.add(low)
    run.add(*(create_request(priority=-1, max_tokens=1) for _ in range(30)))
    while not low.is_finished:
        run.step()
    assert low.num_preemptions == 0
    assert scheduler.num_waiting > 0


def test_request_admitted_without_a_higher_class_waiting_is_preempted() -> None:
    scheduler = create_scheduler(max_num_seqs=1, classes=create_classes(ageing_steps=2))
    first, aged = (create_request(priority=1, max_tokens=8) for _ in range(2))
    start(scheduler, first)
    scheduler.add(aged)
    while aged.status is RequestStatus.WAITING:
        run_step(scheduler)
    scheduler.add(create_request(priority=-1))
    run_step(scheduler)
    assert is_preempted(aged)


def test_block_shortage_preempts_the_last_request_and_finally_the_growing_one() -> None:
    scheduler = create_scheduler(num_blocks=6, policy="mixed", max_preemptions=1)
    high, low = create_request(8, priority=-1, max_tokens=16), create_request(4, priority=1, max_tokens=12)
    start(scheduler, high, low)
    while low.num_preemptions == 0:
        run_step(scheduler)
    assert high.num_preemptions == 0
    while not low.is_finished:
        run_step(scheduler)
    assert high.is_finished


def test_step_that_preempts_the_only_decoding_request_computes_a_token() -> None:
    """A protected prompt holds the other blocks: the decoding request preempts itself, and the prompt continues."""
    scheduler = create_scheduler(
        policy="decode_first", num_blocks=8, max_num_batched_tokens=8, max_preemptions=1, max_long_prefill_tokens=4
    )
    run = SchedulerRun(scheduler)
    protected, decoding = create_request(20, max_tokens=4), create_request(3, max_tokens=20)
    protected.num_preemptions = 1
    run.add(protected, decoding)
    run.finish()
    assert decoding.num_preemptions == 1


@pytest.mark.parametrize("limits", [{"max_running_share": 0.5}, {"max_kv_share": 0.25}])
def test_class_at_its_share_limit_neither_runs_more_nor_preempts(limits: dict[str, Any]) -> None:
    scheduler = create_scheduler(max_num_seqs=2, num_blocks=12, classes=create_classes(high=limits))
    high, low = create_request(8, priority=-1, max_tokens=20), create_request(priority=1, max_tokens=20)
    start(scheduler, high, low)
    waiting = create_request(8, priority=-1)
    scheduler.add(waiting)
    run_step(scheduler)
    assert (low.status, waiting.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)


def test_class_share_limit_allows_at_least_one_request() -> None:
    classes = create_classes(normal={"max_running_share": 0.01, "max_kv_share": 0.01})
    scheduler = create_scheduler(max_num_seqs=2, classes=classes)
    requests = [create_request(20, max_tokens=2) for _ in range(2)]
    for request in requests:
        scheduler.add(request)
    run_step(scheduler)
    assert [request.status for request in requests] == [RequestStatus.RUNNING, RequestStatus.WAITING]
