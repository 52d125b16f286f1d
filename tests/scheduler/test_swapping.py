"""KV cache of preempted requests: recomputed or swapped, entirely or not at all."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.core.request import Request
from llm_serving.core.step import BlockMoveKind
from llm_serving.scheduler import PreemptionMode, Schedule, Scheduler
from support.factories import create_request, create_scheduler, rows, run_step


def preempted(prompt: int = 10, **options: Any) -> tuple[Scheduler, Request, Schedule]:
    """Return a request that was preempted from its slot, and the step that preempted it."""
    scheduler = create_scheduler(max_num_seqs=1, **{"preemption_mode": PreemptionMode.SWAP, **options})
    request = create_request(prompt, request_id="low", priority=1)
    scheduler.add(request)
    run_step(scheduler)
    scheduler.add(create_request(4, request_id="high", priority=-1, max_tokens=2))
    schedule = run_step(scheduler)
    assert schedule is not None
    assert request.num_preemptions == 1
    return scheduler, request, schedule


def kinds(schedule: Schedule) -> list[BlockMoveKind]:
    return [BlockMoveKind(move.kind) for move in schedule.block_moves]


def test_request_is_swapped_out_by_the_step_that_uses_its_blocks() -> None:
    scheduler, request, schedule = preempted(num_swap_blocks=4)
    assert kinds(schedule) == [BlockMoveKind.SWAP_OUT] * 3
    assert scheduler.blocks.host_pool.num_used_blocks == 3
    run_step(scheduler)
    back = run_step(scheduler)
    assert back is not None
    assert kinds(back) == [BlockMoveKind.SWAP_IN] * 3
    assert rows(back) == [("low", 10, 1, True)]
    assert scheduler.blocks.host_pool.num_used_blocks == 0
    assert request.num_preemptions == 1


def test_request_is_recomputed_without_room_in_the_host_pool() -> None:
    scheduler, _, schedule = preempted(num_swap_blocks=2)
    assert schedule.block_moves == []
    run_step(scheduler)
    assert rows(run_step(scheduler)) == [("low", 0, 11, True)]


@pytest.mark.parametrize(
    ("cost", "swaps"),
    [(3.3, True), (3.4, False)],  # three blocks hold the 10 computed tokens
)
def test_auto_mode_chooses_the_cheaper_of_swap_and_recompute(cost: float, swaps: bool) -> None:
    _, _, schedule = preempted(num_swap_blocks=4, preemption_mode=PreemptionMode.AUTO, swap_block_cost_tokens=cost)
    assert bool(schedule.block_moves) is swaps


def test_recompute_mode_never_swaps() -> None:
    _, _, schedule = preempted(num_swap_blocks=4, preemption_mode=PreemptionMode.RECOMPUTE)
    assert schedule.block_moves == []


def test_recompute_uses_the_prefix_cache() -> None:
    scheduler, _, _ = preempted(preemption_mode=PreemptionMode.RECOMPUTE, prefix_caching=True)
    run_step(scheduler)
    assert rows(run_step(scheduler)) == [("low", 8, 3, True)]


def test_finished_swapped_request_frees_the_host_pool() -> None:
    scheduler, request, _ = preempted(num_swap_blocks=4)
    scheduler.finish(request, "abort")  # type: ignore[arg-type]
    scheduler.check_integrity()
    assert scheduler.blocks.host_pool.num_used_blocks == 0


def test_wait_of_a_swapped_request_is_no_decode_gap() -> None:
    """The bound on decode gaps starts again at each admission, even if the first step has no room for the request."""
    scheduler = create_scheduler(
        preemption_mode=PreemptionMode.SWAP,
        num_swap_blocks=8,
        max_num_seqs=2,
        max_prefill_seqs=1,
        static_batching=True,
        policy="mixed",
        num_blocks=5,
    )
    for _ in range(2):
        scheduler.add(create_request(4, max_tokens=12))
    while scheduler.has_unfinished_requests:
        schedule = run_step(scheduler)
        assert schedule is not None
        assert schedule.num_bound_violations == 0
