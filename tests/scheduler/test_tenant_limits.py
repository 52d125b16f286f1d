"""Per-tenant concurrency limits: held requests block no other request."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from llm_serving.core.request import FinishReason, Transfer
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.observability.event_log import EventLog
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.scheduler.schedule import WaitReason
from llm_serving.scheduler.tenant_limits import SlotDemand, TenantLimiter
from llm_serving_tools.recordings.report import describe_state
from support.engine_harness import Harness
from support.factories import create_classes, create_request, create_scheduler, run_step
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun


def of(tenant, count, **arguments):
    return [create_request(request_id=f"{tenant}{i}", tenant=tenant, **arguments) for i in range(count)]


def add(scheduler, *requests):
    for request in requests:
        scheduler.add(request)


def running(scheduler):
    return {request.request_id for request in scheduler.running}


def test_tenant_at_its_limit_blocks_no_other_request():
    scheduler = create_scheduler(max_num_seqs=4, max_running_per_tenant=2)
    mine, others = of("a", 6), of("b", 2)
    add(scheduler, *mine, *others)
    run_step(scheduler)
    assert running(scheduler) == {"a0", "a1", "b0", "b1"}
    assert len(scheduler.waiting) == 0
    assert scheduler.num_waiting == 4
    scheduler.finish(mine[0], FinishReason.ABORT)
    run_step(scheduler)
    assert running(scheduler) == {"a1", "a2", "b0", "b1"}


def test_reload_reports_leases_that_were_given_back():
    limits = create_scheduler(max_running_per_tenant=1, num_schedulers=2).limits
    limiters = [TenantLimiter(limits, create_classes(), defaultdict(int)) for _ in range(2)]
    (request,) = of("a", 1)
    limiters[0].add(request)
    limiters[0].adjust_leases({"a": 1})
    limiters[0].record_admission(request)
    assert limiters[0].pop_demand() == {"a": SlotDemand(1, 1, 1, 0)}
    limiters[0].remove(request)
    limiters[1].adopt(limiters[0])
    assert limiters[1].pop_demand() == {"a": SlotDemand(1, 0, 0, 0)}


class Unseen(dict):
    """Tenants that must not be iterated."""

    def _forbidden(self):
        raise AssertionError("all tenants are gone through")

    __iter__ = items = values = keys = _forbidden


def test_step_examines_only_tenants_with_held_requests():
    scheduler = create_scheduler(max_num_seqs=8, max_running_per_tenant=1)
    add(scheduler, *(request for tenant in "abc" for request in of(tenant, 1, max_tokens=8)), *of("d", 3, max_tokens=2))
    limiter = scheduler.waiting_requests.tenant_limiter
    limiter._tenants = Unseen(limiter._tenants)
    blocked = []
    for _ in range(9):
        run_step(scheduler)
        blocked.append(scheduler.blocked and scheduler.blocked.full_tenants)
    assert limiter.full_tenants == () and blocked[0] == ("d",)
    assert [each.request_id for each in limiter.held_requests()] == []


def test_single_tenants_can_have_their_own_limits():
    scheduler = create_scheduler(max_num_seqs=8, max_running_per_tenant=1, max_running_of_tenant={"b": 3})
    add(scheduler, *of("a", 3), *of("b", 5))
    run_step(scheduler)
    assert running(scheduler) == {"a0", "b0", "b1", "b2"}


def test_higher_class_of_a_tenant_is_released_first():
    scheduler = create_scheduler(max_num_seqs=2, max_running_of_tenant={"a": 1})
    low, high = of("a", 3, priority=1), create_request(request_id="high", tenant="a", priority=-1)
    add(scheduler, *low)
    run_step(scheduler)
    assert running(scheduler) == {"a0"}
    scheduler.add(high)
    scheduler.finish(low[0], FinishReason.ABORT)
    run_step(scheduler)
    assert running(scheduler) == {"high"}


@pytest.mark.parametrize("limit", [1, 3])
def test_classes_of_a_tenant_share_its_limit_by_weight(limit):
    """Regression: the higher classes of a tenant used its whole limit, and its lower class was never served."""
    scheduler = create_scheduler(
        max_num_seqs=4, max_running_of_tenant={"a": limit}, quantum_steps=4, classes=create_classes(ageing_steps=20)
    )
    slots = dict.fromkeys(scheduler.slots_by_class, 0)
    requests = {-1: [], 1: []}
    for _ in range(1500):
        for priority, mine in requests.items():
            mine[:] = [each for each in mine if not each.is_finished]
            while len(mine) < 6:
                mine.append(create_request(priority=priority, tenant="a", max_tokens=8))
                scheduler.add(mine[-1])
        schedule = run_step(scheduler)
        assert schedule.num_bound_violations == 0
        for name, number in scheduler.slots_by_class.items():
            slots[name] += number
    share = slots["low"] / sum(slots.values())
    assert 0.1 < share < 0.3, "weights of 4 and 1"


def test_class_is_charged_for_a_reserved_slot():
    """Regression: a waiting batch request stopped all other requests of its tenant."""
    ended = {}
    for has_low in (False, True):
        scheduler = create_scheduler(
            max_num_seqs=4,
            num_blocks=400,
            max_running_of_tenant={"a": 1},
            quantum_steps=16,
            order="arrival",
            max_overtakes=16,
        )
        others, mine = [], {-1: [], 1: []}
        for _ in range(1200):
            if all(each.is_finished for each in others):
                others = of("b", 20, priority=1, max_tokens=100)
                add(scheduler, *others)
            for priority, requests in mine.items():
                if (priority < 0 or has_low) and (not requests or requests[-1].is_finished):
                    requests.append(create_request(priority=priority, tenant="a", max_tokens=8))
                    scheduler.add(requests[-1])
            assert run_step(scheduler).num_bound_violations == 0
        ended[has_low] = [sum(each.is_finished for each in requests) for requests in mine.values()]
    (alone, _), (beside, low) = ended.values()
    assert beside > alone / 2 and low > 0, "weights of 4 and 1"


def test_class_of_a_tenant_yields_only_to_aged_classes():
    scheduler = create_scheduler(max_num_seqs=4, max_running_of_tenant={"a": 1}, classes=create_classes(500))
    add(scheduler, *of("a", 2, priority=1), *of("a-", 1))
    high = [create_request(request_id=f"high{i}", tenant="a", priority=-1) for i in range(5)]
    add(scheduler, *high)
    started = []
    while scheduler.has_unfinished_requests:
        started += [request.request_id for request in run_step(scheduler).started]
    assert started[-2:] == ["a0", "a1"]


def test_preempted_request_counts_against_the_tenant_limit():
    scheduler = create_scheduler(max_num_seqs=1, max_model_len=32, max_running_of_tenant={"a": 1})
    first, second = of("a", 2, priority=1, max_tokens=4)
    add(scheduler, first, second)
    run_step(scheduler)
    add(scheduler, create_request(request_id="high", priority=-1, max_tokens=2))
    run_step(scheduler)
    assert running(scheduler) == {"high"}
    while not first.is_finished:
        assert second.first_scheduled_time is None
        run_step(scheduler)
    while not second.is_finished:
        run_step(scheduler)


def test_held_request_can_finish_and_change_its_class():
    scheduler = create_scheduler(max_num_seqs=4, max_running_per_tenant=1)
    first, second, third, fourth = of("a", 4)
    add(scheduler, first, second, third, fourth)
    run_step(scheduler)
    scheduler.finish(second, FinishReason.ABORT)
    assert scheduler.set_priority(third, 1)
    assert scheduler.set_priority(fourth, 5)
    scheduler.check_integrity()
    assert [request.request_class.name for request in (third, fourth)] == ["low", "low"]
    started = []
    while scheduler.has_unfinished_requests:
        schedule = run_step(scheduler)
        started += [request.request_id for request in schedule.started]
    assert started == ["a2", "a3"]


def test_beam_search_exceeds_the_tenant_limit():
    harness = Harness(max_running_per_tenant=1, event_log=EventLog(10, 1000))
    request = create_request(request_id="beams", tenant="a", max_tokens=12, logprobs=0)
    request.beam_search = BeamSearchParams(width=3)
    harness.engine.submit(request)
    harness.engine.submit(create_request(request_id="other", tenant="a"))
    harness.run()
    assert harness.last("beams").finish_reason is FinishReason.LENGTH
    assert harness.last("other").finish_reason is FinishReason.LENGTH


def test_blocked_names_full_tenants():
    scheduler = create_scheduler(max_running_per_tenant=1)
    add(scheduler, *of("a", 3))
    run_step(scheduler)
    assert scheduler.blocked is not None
    assert scheduler.blocked.reason is WaitReason.TENANT
    assert scheduler.blocked.full_tenants == ("a",)
    assert "waiting because of their tenant's limit" in describe_state(scheduler)
    scheduler.add(create_request(tenant="b"))
    run_step(scheduler)
    assert scheduler.blocked.full_tenants == ("a",)


@pytest.mark.parametrize("seed", range(12))
def test_tenant_limits_and_bounds_hold_and_replays_are_equal(seed):
    rng = random.Random(seed)
    limits = {"a": rng.choice([1, 2, 3]), "b": rng.choice([1, 3])}
    files = MemoryFiles()
    scheduler = create_recorded(
        files,
        policy=rng.choice(["prefill_first", "mixed", "decode_first", "fcfs"]),
        num_blocks=rng.choice([12, 20, 64]),
        max_num_seqs=rng.choice([2, 4]),
        max_num_batched_tokens=16,
        max_model_len=32,
        max_overtakes=rng.choice([0, 1, 4]),
        max_preemptions=rng.choice([0, 2]),
        classes=create_classes(ageing_steps=rng.choice([1, 10])),
        max_running_of_tenant=limits,
        max_steps_in_flight=rng.choice([1, 2]),
    )
    run = SchedulerRun(scheduler)
    for _ in range(200):
        if rng.random() < 0.3:
            tenant, priority = rng.choice("aabc"), rng.choice([-1, 0, 1])
            run.add(create_request(rng.randint(1, 12), priority=priority, tenant=tenant, max_tokens=rng.randint(1, 16)))
        for request in rng.sample(run.requests, min(len(run.requests), rng.choice([0, 0, 0, 1]))):
            if rng.random() < 0.5 and scheduler.policy.honours_classes:
                scheduler.set_priority(request, rng.choice([-1, 0, 1]))
            elif rng.random() < 0.5:
                run.abort(request)
            scheduler.check_integrity()
        run.step()
        for tenant, limit in limits.items():
            assert sum(request.tenant == tenant for request in scheduler.running) <= limit
    run.finish()
    assert list(scheduler.held_by_tenant_limits()) == []
    [data] = files.files
    assert replay(data).hash == seal(data)


def brought(**limits):
    """Return a scheduler whose only slot is in use, and a waiting request of tenant `a` that migrated to it."""
    scheduler = create_scheduler(max_num_seqs=1, num_schedulers=2, **limits)
    moved = create_request(request_id="moved", tenant="a")
    moved.transfer = Transfer()
    add(scheduler, *of("b", 1))
    scheduler.adjust_tenant_leases({"b": 1})
    run_step(scheduler)
    add(scheduler, moved)
    return scheduler, moved


def test_migrated_slot_survives_a_change_of_class():
    scheduler, moved = brought(max_running_per_tenant=1)
    assert scheduler.pop_tenant_demand()["a"] == SlotDemand(1, 1, 1, 0)
    assert scheduler.set_priority(moved, -1)
    assert moved in scheduler.waiting
    assert scheduler.pop_tenant_demand().get("a", SlotDemand(1, 1, 1, 0)) == SlotDemand(1, 1, 1, 0)


def test_reload_with_a_tenant_limit_counts_migrated_requests():
    scheduler, moved = brought()
    limits = replace(scheduler.limits, max_running_per_tenant=1)
    scheduler.reload(SchedulingRules(limits, scheduler.policy, scheduler.classes, scheduler.order, False))
    assert moved in scheduler.waiting
    assert scheduler.pop_tenant_demand()["a"] == SlotDemand(1, 1, 1, 0)
