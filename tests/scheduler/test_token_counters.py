"""Virtual token counters: the service of a tenant, and its counter when it joins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.scheduler import fair_sharing
from llm_serving.scheduler.fair_sharing import OUTPUT_TOKEN_WEIGHT, TenantTokenCounters
from support.factories import create_classes, create_request, create_scheduler
from support.scheduler_run import SchedulerRun


def test_token_counter_adds_service() -> None:
    shares = TenantTokenCounters()
    shares.join("a", None)
    shares.charge("a", 3)
    shares.charge("a", 4)
    assert (shares.served("a"), shares.served("b")) == (7, 0)


def test_joining_tenant_is_lifted_to_the_least_waiting_counter() -> None:
    shares = TenantTokenCounters()
    shares.join("a", None)
    shares.charge("a", 50)
    shares.join("b", 50)
    assert shares.served("b") == 50


def test_tenant_above_the_floor_keeps_its_counter() -> None:
    shares = TenantTokenCounters()
    shares.join("a", None)
    shares.charge("a", 50)
    shares.join("a", 20)
    assert shares.served("a") == 50


def test_leaving_tenant_does_not_lift_others_above_waiting_ones() -> None:
    shares = TenantTokenCounters()
    shares.join("heavy", None)
    shares.charge("heavy", 1000)
    shares.join("light", None)
    shares.leave("heavy")
    shares.join("new", shares.served("light"))
    assert shares.served("new") == shares.served("light")


def test_joining_tenant_starts_from_the_last_to_leave_if_none_waits() -> None:
    shares = TenantTokenCounters()
    shares.join("a", None)
    shares.leave("a")
    shares.charge("a", 30)  # its last request runs on
    shares.join("b", None)
    assert shares.served("b") == 30


@pytest.mark.parametrize("waits", [False, True])
def test_number_of_token_counters_is_bounded(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_sharing, "MAX_TENANTS", 10)
    shares = TenantTokenCounters()
    for index in range(200):
        shares.join(f"user-{index}", shares.served(f"user-{index - 1}") if waits and index else None)
        shares.leave(f"user-{index}")
        shares.charge(f"user-{index}", 5)
    assert len(shares._served) <= 11
    assert shares.served("user-199") == 1000


def test_served_tenants_are_evicted_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a tenant without service waits, every served tenant is above the floor of a new one."""
    monkeypatch.setattr(fair_sharing, "MAX_TENANTS", 10)
    scheduler = create_scheduler(max_num_seqs=1, max_overtakes=1)
    shares = scheduler.waiting.queues["normal"].token_counters
    run = SchedulerRun(scheduler)
    for index in range(60):
        run.add(create_request(1 + index % 3, max_tokens=1, tenant=f"user-{index}"))
        if index > 2:
            run.step()
            assert len(scheduler.waiting) > 1
    assert len(shares._served) <= 10


def test_tenant_with_the_most_service_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_sharing, "MAX_TENANTS", 10)
    shares = TenantTokenCounters()
    for index in range(60):
        shares.join(f"user-{index}", 0)
        shares.charge(f"user-{index}", 1000 if index == 7 else 1 + index % 5)
    assert (shares.served("user-7"), shares.served("user-8")) == (1000, 0)


@settings(max_examples=40)
@given(
    sizes=st.fixed_dictionaries({name: st.tuples(st.integers(1, 16), st.integers(1, 8)) for name in "xy"}),
    max_num_seqs=st.integers(1, 4),
    num_blocks=st.integers(6, 20),
    head_start=st.integers(0, 5),
)
def test_tenants_that_always_wait_get_equal_service(
    sizes: dict[str, tuple[int, int]], max_num_seqs: int, num_blocks: int, head_start: int
) -> None:
    """The difference stays below a constant (Sheng et al. 2024, theorem 4.4): 2 max(longest prompt, full cache).

    Tokens computed again count, so a tenant does not pay for it with less than its share.
    """
    scheduler = create_scheduler(
        policy="mixed",
        max_overtakes=10**6,
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        max_num_batched_tokens=16,
        classes=create_classes()[:1],
    )
    run = SchedulerRun(scheduler)
    served = dict.fromkeys(sizes, 0)
    for step in range(60):
        for name, (prompt, output) in sizes.items():
            if step >= head_start * (name == "y"):
                for _ in range(max_num_seqs + 1):  # more than a step can take
                    run.add(create_request(prompt, max_tokens=output, tenant=name))
        schedule = run.step()
        assert schedule is not None
        for row in schedule.rows:
            served[row.request.tenant] += row.query_len + (OUTPUT_TOKEN_WEIGHT - 1) * row.num_samples
        if step == head_start:
            at_start = dict(served)
        if step > head_start:
            gained = [served[name] - at_start[name] for name in sizes]
            num_cached = scheduler.blocks.pool.num_blocks * scheduler.blocks.block_size
            assert abs(gained[0] - gained[1]) <= 2 * max(16, OUTPUT_TOKEN_WEIGHT * num_cached)


def test_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    scheduler = create_scheduler(max_num_seqs=1, max_overtakes=100)
    run = SchedulerRun(scheduler)
    run.add(*(create_request(tenant="many", max_tokens=1) for _ in range(20)))
    run.step()
    run.step()
    few = create_request(tenant="few", max_tokens=1)
    run.add(few)
    run.step()
    run.step()
    assert few.is_finished
