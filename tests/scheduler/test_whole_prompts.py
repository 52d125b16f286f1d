"""Prompts of an encoder, each of which one step must compute whole."""

from __future__ import annotations

import random

import pytest
from llm_serving.core.request import Request
from llm_serving.scheduler.schedule import WaitReason
from support.factories import create_request, create_scheduler, rows, run_step


def create_prompt(size: int, name: str, **fields: int) -> Request:
    return create_request(size, request_id=name, max_tokens=0, **fields)


def steps(*sizes: int, **limits: int | str) -> list[dict[str, int]]:
    """Return the tokens of each prompt in each step; prompts are named a, b, ..."""
    scheduler = create_scheduler(**{"max_num_batched_tokens": 12, "max_model_len": 12, "whole_prompts": True, **limits})
    for name, size in zip("abcdef", sizes, strict=False):
        scheduler.add(create_prompt(size, name))
    formed = []
    while scheduler.has_unfinished_requests:
        formed.append({name: query_len for name, _, query_len, _ in rows(run_step(scheduler))})
        scheduler.check_integrity()
    return formed


def test_whole_prompt_waits_for_a_step_with_enough_budget() -> None:
    assert steps(5, 7, 1, 12, 3) == [{"a": 5, "b": 7}, {"c": 1}, {"d": 12}, {"e": 3}]


def test_a_whole_prompt_is_not_capped_beside_others() -> None:
    assert steps(8, 4, max_long_prefill_tokens=3) == [{"a": 8, "b": 4}]


@pytest.mark.parametrize("limits", [{"separate": True}, {"static_batching": True}, {"policy": "decode_first"}])
def test_whole_prompts_are_batched_under_every_policy(limits: dict[str, int]) -> None:
    assert [sum(step.values()) for step in steps(8, 8, 4, **limits)] == [8, 12]


def test_blocked_whole_prompt_names_the_budget() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=12, max_model_len=12, whole_prompts=True)
    for name in "ab":
        scheduler.add(create_prompt(8, name))
    run_step(scheduler)
    assert scheduler.blocked is not None and scheduler.blocked.request_id == "b"
    assert scheduler.blocked.reason is WaitReason.BUDGET


def test_whole_prompts_of_higher_classes_go_first() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=12, max_model_len=12, whole_prompts=True)
    scheduler.add(create_prompt(12, "first"))
    scheduler.add(create_prompt(12, "low", priority=10))
    scheduler.add(create_prompt(12, "high", priority=-10))
    order = [rows(run_step(scheduler))[0][0] for _ in range(3)]
    assert order.index("high") < order.index("low")


@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "mixed"])
@pytest.mark.parametrize("seed", range(4))
def test_whole_prompts_are_never_divided_and_keep_their_bounds(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    scheduler = create_scheduler(
        policy=policy, max_num_batched_tokens=40, max_model_len=40, num_blocks=24, whole_prompts=True
    )
    added = 0
    while added < 150 or scheduler.has_unfinished_requests:
        for _ in range(rng.choice([0, 0, 1, 5]) if added < 150 else 0):
            scheduler.add(create_prompt(rng.choice([1, 7, 21, 40]), f"r{added}", priority=rng.choice([-10, 0, 10])))
            added += 1
        schedule = scheduler.schedule(0.0)
        if schedule is None:
            continue
        assert all(row.query_len == row.request.num_prompt_tokens for row in schedule.rows)
        assert schedule.num_tokens <= 40 and schedule.num_bound_violations == 0
        scheduler.update(schedule, [])
        scheduler.check_integrity()
