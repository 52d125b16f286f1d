"""Forks wait until the prompt of their parent is computed, then share its blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.core.step import BlockMoveKind
from llm_serving.scheduler import Scheduler
from support.factories import create_request, create_scheduler, rows, run_step


def create_family(prompt: int = 10, count: int = 2, **options: Any) -> tuple[Scheduler, Request, list[Request]]:
    """Return a scheduler with a request "parent" and its forks "0", "1", ..., all waiting."""
    scheduler = create_scheduler(**options)
    parent = create_request(prompt, request_id="parent")
    forks = [replace(parent, request_id=str(index), fork_of="parent", output_token_ids=[]) for index in range(count)]
    for request in (parent, *forks):
        scheduler.add(request)
    scheduler.check_integrity()
    return scheduler, parent, forks


def test_forks_wait_for_the_prompt_and_copy_the_block_in_which_they_start() -> None:
    scheduler, _, forks = create_family(max_num_batched_tokens=8)
    assert rows(run_step(scheduler)) == [("parent", 0, 8, False)]
    assert rows(run_step(scheduler)) == [("parent", 8, 2, True)]
    schedule = run_step(scheduler)
    assert rows(schedule) == [("0", 9, 1, True), ("1", 9, 1, True), ("parent", 10, 1, True)]
    assert schedule is not None
    table = scheduler.blocks.block_table("parent")
    copies = [(int(BlockMoveKind.COPY), table[2], scheduler.blocks.block_table(fork.request_id)[2]) for fork in forks]
    assert [move[:3] for move in schedule.block_moves] == copies


def test_forks_are_not_admitted_before_the_reply() -> None:
    scheduler, _, _ = create_family()
    scheduler.schedule(0.0)
    assert rows(scheduler.schedule(0.0)) == [("parent", 10, 1, True)]


def test_forks_that_fit_only_by_sharing_blocks_are_admitted() -> None:
    scheduler, parent, forks = create_family(prompt=17, num_blocks=12)
    run_step(scheduler)
    run_step(scheduler)
    assert [request.status for request in (parent, *forks)] == [RequestStatus.RUNNING] * 3
    assert scheduler.blocks.pool.num_used_blocks == 4 + 3


@pytest.mark.parametrize("steps", range(3))
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_forks_run_alone_after_their_parent_has_finished(steps: int, reason: FinishReason) -> None:
    scheduler, parent, forks = create_family(max_num_batched_tokens=8)
    for _ in range(steps):
        run_step(scheduler)
    scheduler.finish(parent, reason)
    while scheduler.has_unfinished_requests:
        assert run_step(scheduler) is not None
    assert [len(fork.output_token_ids) for fork in forks] == [8, 8]
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_waiting_fork_can_be_aborted() -> None:
    scheduler, _, forks = create_family()
    scheduler.finish(forks[0], FinishReason.ABORT)
    scheduler.check_integrity()
    run_step(scheduler)
    assert [name for name, *_ in rows(run_step(scheduler))] == ["1", "parent"]


def test_late_fork_shares_blocks_at_once() -> None:
    scheduler, parent, _ = create_family(count=0)
    run_step(scheduler)
    scheduler.add(replace(create_request(10, request_id="late"), fork_of="parent"))
    assert rows(run_step(scheduler))[0] == ("late", 9, 1, True)
    assert parent.status is RequestStatus.RUNNING


def test_fork_of_a_finished_request_is_an_ordinary_request() -> None:
    scheduler = create_scheduler()
    scheduler.add(replace(create_request(10, request_id="orphan"), fork_of="unknown"))
    assert rows(run_step(scheduler)) == [("orphan", 0, 10, True)]


def test_fork_of_a_preempted_parent_computes_its_own_prompt() -> None:
    scheduler, parent, forks = create_family(count=1, max_num_seqs=1)
    run_step(scheduler)
    scheduler.add(create_request(4, request_id="high", priority=-1, max_tokens=1))
    assert rows(run_step(scheduler)) == [("high", 0, 4, True)]
    assert parent.status is forks[0].status is RequestStatus.WAITING
    while scheduler.has_unfinished_requests:
        assert run_step(scheduler) is not None
