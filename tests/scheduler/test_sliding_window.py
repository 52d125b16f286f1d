"""Requests longer than the cache, with a sliding window in every layer."""

from __future__ import annotations

from support.factories import create_request, create_scheduler, rows, run_step
from support.scheduler_run import SchedulerRun


def test_long_prompts_run_together_in_the_blocks_of_their_windows() -> None:
    """Windows of 8 tokens and steps of 8 lie in 5 blocks of 4; each prompt has 25 blocks of tokens."""
    scheduler = create_scheduler(window=8, num_blocks=12, max_num_batched_tokens=8, max_num_seqs=2)
    run = SchedulerRun(scheduler)
    requests = [create_request(100, max_tokens=20, seed=seed) for seed in (1, 2)]
    run.add(*requests)
    together, held = 0, 0
    for _ in range(60):
        run.step()
        together += len(scheduler.running) == 2
        held = max([held, *(scheduler.blocks.num_blocks_held(each.request_id) for each in requests)])
    run.finish()
    assert together > 10
    assert held <= scheduler.blocks.max_blocks[0] == 5
    assert not any(each.num_preemptions for each in requests)


def test_prompt_chunk_is_limited_by_free_blocks() -> None:
    """Three blocks hold the window of 4 and some of the 16 tokens a step may have."""
    scheduler = create_scheduler(window=4, num_blocks=3, max_num_batched_tokens=16)
    scheduler.add(create_request(40, request_id="a", max_tokens=1))
    steps = [rows(run_step(scheduler)) for _ in range(4)]
    assert steps[0] == [("a", 0, 12, False)]
    assert steps[1] == [("a", 12, 8, False)], "the block with tokens 8 to 11 is still seen"
    assert max(row[2] for step in steps[1:] for row in step) < 12


def test_protected_request_never_lacks_a_block() -> None:
    scheduler = create_scheduler(
        window=8, num_blocks=10, max_num_batched_tokens=8, max_num_seqs=3, max_preemptions=0, prefix_caching=True
    )
    run = SchedulerRun(scheduler)
    run.add(*(create_request(50, max_tokens=30, seed=seed) for seed in range(4)))  # of one text
    run.finish()
    assert not any(each.num_preemptions for each in run.requests)


def test_bounds_include_sliding_windows() -> None:
    """More slots than for whole sequences, so less waiting for each request ahead."""
    whole, sliding = (
        create_scheduler(window=window, num_blocks=64, max_num_batched_tokens=16, max_model_len=256)
        for window in (None, 16)
    )
    assert sliding.bounds[0].steps_per_admission < whole.bounds[0].steps_per_admission
