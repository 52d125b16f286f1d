"""Reload of the rules of a running scheduler: every request finishes, and the new bounds hold from then on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.policies import ShortestOrder
from support.factories import create_request, create_scheduler
from support.scheduler_loads import arrivals, arrive, create_load, other_rules, scheduler_options
from support.scheduler_run import SchedulerRun


def rules_of(scheduler: Scheduler, **limits: Any) -> SchedulingRules:
    """Return the rules of the scheduler with other limits."""
    changed = replace(scheduler.limits, **limits)
    return SchedulingRules(
        changed, scheduler.policy, scheduler.classes, scheduler.order, scheduler.blocks.prefix_caching
    )


@settings(max_examples=150)
@given(
    arrivals=arrivals,
    options=scheduler_options(),
    others=st.lists(st.tuples(st.integers(0, 20), scheduler_options()), min_size=1, max_size=3),
)
def test_bounds_hold_after_any_reload(
    arrivals: list[tuple[Any, ...]], options: dict[str, Any], others: list[tuple[int, dict[str, Any]]]
) -> None:
    run = SchedulerRun(create_scheduler(**options))
    load = create_load(arrivals)
    for step in range(26):
        arrive(run, load, step)
        for at_step, other in others:
            if at_step == step:
                run.reload(other_rules(options, other))
        run.step()
    run.finish()


def test_running_request_of_a_removed_class_keeps_its_slot() -> None:
    run = SchedulerRun(create_scheduler(max_num_seqs=3))
    run.add(*(create_request(3, max_tokens=6, seed=seed) for seed in range(3)))
    run.step()
    run.reload(rules_of(run.scheduler, max_num_seqs=1))
    for priority in (-1, 9):
        assert run.scheduler.set_priority(run.requests[0], priority)
        run.scheduler.check_integrity()
    run.finish()


def test_running_requests_keep_their_slots_after_a_reload_with_fewer() -> None:
    run = SchedulerRun(create_scheduler(max_num_seqs=3, max_num_batched_tokens=12))
    run.add(*(create_request(3, max_tokens=6, seed=seed) for seed in range(4)))
    run.step()
    assert len(run.scheduler.running) == 3
    run.reload(rules_of(run.scheduler, max_num_seqs=1, max_num_batched_tokens=1))
    schedule = run.step()
    assert schedule is not None and len(schedule.rows) == 3
    assert [len(run.scheduler.running) for _ in range(9) if run.step()][-3:] == [1, 1, 1]
    run.finish()
    assert [request.num_preemptions for request in run.requests] == [0, 0, 0, 0]


def test_waiting_requests_are_queued_again_by_arrival() -> None:
    run = SchedulerRun(create_scheduler(max_num_seqs=1))
    first, *others = (create_request(3, max_tokens=4, seed=seed) for seed in range(4))
    run.add(first, *others)
    run.step()
    run.step()
    run.reload(rules_of(run.scheduler, quantum_steps=1))
    assert [request.wait_bound for request in others] == sorted(request.wait_bound or 0 for request in others)
    started = []
    while run.scheduler.has_unfinished_requests:
        schedule = run.step()
        started += [] if schedule is None else schedule.started
    assert started == others
    assert others[0].num_steps_waited is not None and others[0].num_steps_waited > 2  # those before count


def test_reload_applies_classes_and_order() -> None:
    run = SchedulerRun(create_scheduler(max_num_seqs=1, order="arrival"))
    low, high = create_request(3, priority=1), create_request(3, priority=-1)
    run.add(low, high)
    all_classes = (RequestClass(name="all", rank=0),)
    run.reload(rules_of(run.scheduler)._replace(classes=all_classes, order=ShortestOrder()))
    assert low.request_class is high.request_class is all_classes[0]
    assert [each.name for each in run.scheduler.bounds] == ["all"]
    assert isinstance(run.scheduler.order, ShortestOrder)


def test_reload_keeps_an_order_of_the_same_kind() -> None:
    scheduler = create_scheduler(order="shortest")
    order = scheduler.order
    scheduler.reload(rules_of(scheduler)._replace(order=ShortestOrder()))
    assert scheduler.order is order


def test_remote_service_of_an_unknown_class_is_ignored() -> None:
    scheduler = create_scheduler()
    scheduler.charge_remote_service({("all", "tenant"): 3, ("high", "tenant"): 4})
    assert scheduler.waiting.queues["high"].token_counters.served("tenant") == 4
