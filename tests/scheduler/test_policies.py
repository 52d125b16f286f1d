"""The pattern of steps that each policy forms of the same load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llm_serving.core.enums import OrderName, PolicyName
from llm_serving.scheduler import Schedule
from llm_serving.scheduler.policies import ORDERS, POLICIES, Preference, Throughput
from support.factories import create_config, create_request, create_scheduler
from support.scheduler_run import SchedulerRun


def kind(schedule: Schedule | None) -> str:
    """Return P for a step of prompts only, D for decodes only, M for both, and - for no step."""
    if schedule is None:
        return "-"
    decodes = {row.num_computed >= row.request.num_prompt_tokens for row in schedule.rows}
    return "M" if len(decodes) == 2 else "D" if decodes == {True} else "P"


def pattern(num_steps: int, arrives: Callable[[int], bool], **options: Any) -> str:
    """Return the kinds of the steps after the first, which starts a decoding request; each prompt fills a step."""
    run = SchedulerRun(create_scheduler(num_blocks=200, max_num_batched_tokens=8, **options))
    run.add(create_request(4, max_tokens=60))
    run.step()
    kinds = ""
    for step in range(num_steps):
        if arrives(step):
            run.add(create_request(8, max_tokens=1))
        kinds += kind(run.step())
    return kinds


@pytest.mark.parametrize(
    ("policy", "separate", "expected"),
    [
        ("prefill_first", False, "PPMPPMPPMPPM"),
        ("prefill_first", True, "PPDPPDPPDPPD"),
        ("decode_first", False, "DDDPMDDDPMDD"),
        ("decode_first", True, "DDDPDDDPDDDP"),
        ("mixed", False, "MMMMMMMMMMMM"),
        ("mixed", True, "DDDPDDDPDDDP"),
        ("fcfs", False, "MMMMMMMMMMMM"),
        ("fcfs", True, "DDDPDDDPDDDP"),
    ],
)
def test_policy_step_pattern_under_continuous_prompts(policy: str, separate: bool, expected: str) -> None:
    """The decoding request is left out of at most 2 steps (1 for all but prefill_first), prompts of at most 3."""
    kinds = pattern(12, lambda step: True, policy=policy, separate=separate, max_decode_gap=2, max_prefill_gap=3)
    assert kinds == expected


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_decodes_in_every_step_without_prompts(policy: str, separate: bool) -> None:
    assert pattern(5, lambda step: False, policy=policy, separate=separate) == "DDDDD"


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_prefills_at_once_if_no_request_decodes(policy: str, separate: bool) -> None:
    run = SchedulerRun(create_scheduler(policy=policy, separate=separate, max_num_batched_tokens=8))
    for _ in range(3):
        run.add(create_request(8, max_tokens=1))
    assert "".join(kind(run.step()) for _ in range(4)) == "PPP-"


def test_throughput_policy_prefills_when_empty_slots_have_cost_as_much() -> None:
    config = create_config(max_num_seqs=8, prefill_time_ms_per_req=100, decode_time_ms_per_req=10)
    policy = Throughput(config)
    # A prefill delays 4 decoding requests, which costs 400 ms. A step wastes 40 ms.
    preferences = [policy.prefer(4, prompts_wait=True) for _ in range(20)]
    assert [index for index, each in enumerate(preferences) if each is Preference.PREFILL_FIRST] == [9, 19]
    assert preferences.count(Preference.DECODE_ONLY) == 18


def test_throughput_policy_prefills_at_once_if_no_request_decodes() -> None:
    policy = Throughput(create_config())
    assert policy.prefer(0, prompts_wait=True) is Preference.PREFILL_FIRST


def test_static_batching_decodes_until_the_batch_has_ended() -> None:
    run = SchedulerRun(create_scheduler(static_batching=True, max_num_seqs=2))
    for max_tokens in (2, 4, 1):
        run.add(create_request(4, max_tokens=max_tokens))
    assert "".join(kind(run.step()) for _ in range(6)) == "PDDDP-"


def test_prefills_get_the_rest_of_the_budget_after_decodes() -> None:
    run = SchedulerRun(create_scheduler(policy="mixed", max_num_batched_tokens=8))
    run.add(create_request(3, max_tokens=9), create_request(3, max_tokens=9))
    run.step()
    run.add(create_request(20))
    schedule = run.step()
    assert schedule is not None
    assert [row.query_len for row in schedule.rows] == [1, 1, 6]


def test_decodes_get_the_rest_of_the_budget_after_prefills() -> None:
    run = SchedulerRun(create_scheduler(policy="prefill_first", max_num_batched_tokens=8))
    run.add(create_request(3, max_tokens=9), create_request(3, max_tokens=9))
    run.step()
    run.add(create_request(7))
    schedule = run.step()
    assert schedule is not None
    assert [row.query_len for row in schedule.rows] == [7, 1]


def test_every_policy_and_order_of_the_configuration_is_implemented() -> None:
    assert list(POLICIES) == list(PolicyName)
    assert list(ORDERS) == list(OrderName)
