"""The `max_running` limit of a tenant holds for all replicas together."""

from __future__ import annotations

import random
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.migration import continuation_of
from llm_serving.engine.fleet.monitors import MIN_TENANTS, LimitMonitor
from llm_serving.engine.fleet.sharing import TenantSlots
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.scheduler.tenant_limits import SlotDemand
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.virtual_replica import VirtualReplica
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream
from support.factories import create_classes, create_request, create_scheduler
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun
from support.simulator_workloads import config_with, create_profile


class Leases:
    """Replicas that report their demand for slots of tenant `a` and apply the leases they get."""

    def __init__(self, limit: int, num_replicas: int) -> None:
        self.slots, self.limit = TenantSlots(), limit
        self.held = [0] * num_replicas
        self.woken: list[int] = []
        for index in range(num_replicas):
            self.slots.join(index, lambda index=index: self.woken.append(index))  # type: ignore[misc]

    def report(self, replica: int, num_active: int, num_waiting: int, num_leased: int | None = None) -> list[int]:
        """Report a demand, let woken replicas exchange, and return the slots leased to each replica."""
        demand = SlotDemand(
            self.limit, self.held[replica] if num_leased is None else num_leased, num_active, num_waiting
        )
        self.held[replica] = demand.num_leased
        self._apply(replica, {"a": demand})
        while self.woken:
            self._apply(self.woken.pop(0), {})
        return self.held

    def _apply(self, replica: int, demands: Mapping[str, SlotDemand]) -> None:
        self.held[replica] += self.slots.exchange(replica, demands).get("a", 0)
        for tenant in self.slots._tenants.values():
            assert tenant.num_leased == sum(map(tenant.leased_to, tenant.demands))


def test_first_replica_to_report_gets_the_slots_that_it_needs() -> None:
    leases = Leases(limit=3, num_replicas=2)
    assert leases.report(0, 0, 2) == [2, 0]
    assert leases.report(1, 0, 5) == [2, 1]


def test_returned_slot_is_leased_to_the_replica_with_the_fewest_slots() -> None:
    leases = Leases(limit=3, num_replicas=2)
    assert leases.report(0, 0, 9) == [3, 0]
    leases.report(0, 3, 6)
    assert leases.report(1, 0, 9) == [3, 0]
    assert leases.report(0, 2, 6, num_leased=2) == [2, 1]
    assert leases.report(0, 1, 6, num_leased=1) == [2, 1], "the replica with no more slots than the other gets it back"


def test_single_slot_rotates_between_replicas() -> None:
    leases = Leases(limit=1, num_replicas=3)
    leases.report(0, 0, 5)
    leases.report(0, 1, 4)
    leases.report(1, 0, 5)
    leases.report(2, 0, 5)
    order = []
    for _ in range(6):
        holder = leases.held.index(1)
        order.append(holder)
        leases.report(holder, 1, 4)
        leases.report(holder, 0, 4, num_leased=0)
    assert order == [0, 1, 2, 0, 1, 2]


def test_slots_without_demand_are_returned() -> None:
    leases = Leases(limit=2, num_replicas=2)
    leases.report(0, 0, 2)
    leases.report(1, 0, 1)
    assert leases.report(0, 0, 1) == [1, 1]
    assert leases.report(0, 0, 0) == [0, 1]
    assert leases.report(1, 1, 0) == [0, 1]
    assert leases.report(1, 0, 0, num_leased=0) == [0, 0]
    assert not leases.slots._tenants


def test_drained_replica_returns_its_slots() -> None:
    leases = Leases(limit=2, num_replicas=2)
    leases.report(0, 0, 2)
    leases.report(0, 2, 0)
    assert leases.report(1, 0, 2) == [2, 0]
    leases.slots.leave(0)
    assert leases.woken == [1]
    assert leases.report(1, 0, 2) == [2, 2]


def test_a_lower_limit_revokes_unused_slots() -> None:
    leases = Leases(limit=4, num_replicas=2)
    leases.report(0, 0, 4)
    leases.report(0, 2, 2)
    leases.limit = 1
    assert leases.report(0, 2, 2)[0] == 2
    leases.report(1, 0, 1)
    assert leases.report(0, 1, 2, num_leased=1) == [1, 0]
    assert leases.report(0, 0, 2, num_leased=0) == [0, 1]


def test_a_lower_limit_revokes_unused_slots_of_another_replica_at_once() -> None:
    leases = Leases(limit=4, num_replicas=2)
    leases.report(0, 0, 3)
    leases.limit = 1
    leases.report(1, 0, 1)
    leases._apply(0, {})
    assert leases.held == [1, 0]


def test_a_request_in_migration_keeps_its_slot() -> None:
    leases = Leases(limit=1, num_replicas=2)
    leases.report(0, 0, 2)
    leases.report(0, 1, 1)
    leases.slots.start_migration("r", "a")
    assert leases.report(0, 0, 1, num_leased=0) == [0, 0]
    leases.slots.finish_migration(1, "r")
    assert leases.report(1, 1, 0, num_leased=1) == [0, 1]
    assert leases.report(1, 0, 0, num_leased=0) == [1, 0]


def test_a_request_that_ends_in_migration_returns_its_slot() -> None:
    leases = Leases(limit=1, num_replicas=2)
    leases.report(0, 0, 2)
    leases.report(0, 1, 1)
    leases.slots.start_migration("r", "a")
    leases.report(0, 0, 1, num_leased=0)
    leases.slots.end_migration("r")
    assert leases.woken == [0]
    assert leases.report(0, 0, 1) == [1, 0]


class Replicas:
    """Recorded schedulers of one master, stepped one after the other."""

    def __init__(self, num_replicas: int, limit: int, **options: object) -> None:
        self.limit, self.accounting = limit, FleetAccounting()
        self.files = [MemoryFiles() for _ in range(num_replicas)]
        self.runs = [
            SchedulerRun(
                create_recorded(
                    files,
                    max_running_of_tenant={"a": limit},
                    num_schedulers=num_replicas,
                    exports=TransferPool(16, 16 * index, 1000 * index),
                    **options,
                )
            )
            for index, files in enumerate(self.files)
        ]
        for index in range(num_replicas):
            self.accounting.join(index)

    def step(self, index: int) -> None:
        scheduler = self.runs[index].scheduler
        if leases := self.accounting.tenant_slots.exchange(index, scheduler.pop_tenant_demand()):
            scheduler.adjust_tenant_leases(leases)
        self.runs[index].step()
        assert self.num_running("a") <= self.limit

    def num_running(self, tenant: str) -> int:
        running = (request for run in self.runs for request in run.scheduler.running)
        return sum(request.tenant == tenant for request in running)

    def finish(self) -> None:
        for _ in range(3000):
            if not any(run.scheduler.has_unfinished_requests for run in self.runs):
                break
            for index in range(len(self.runs)):
                self.step(index)
        for files, run in zip(self.files, self.runs, strict=True):
            run.finish()
            [data] = files.files
            assert replay(data).hash == seal(data)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_tenant_runs_no_more_requests_on_several_replicas_than_on_one(num_replicas: int) -> None:
    replicas = Replicas(num_replicas, limit=2, max_num_seqs=4)
    for run in replicas.runs:
        run.add(*(create_request(4, tenant="a", max_tokens=3) for _ in range(4)))
        run.add(*(create_request(4, tenant="b", max_tokens=3) for _ in range(2)))
    most = dict.fromkeys("ab", 0)
    for _ in range(4):
        for index in range(num_replicas):
            replicas.step(index)
            most = {tenant: max(number, replicas.num_running(tenant)) for tenant, number in most.items()}
    assert most == {"a": 2, "b": 2 * num_replicas}
    replicas.finish()


@pytest.mark.parametrize("seed", range(12))
def test_tenant_limit_holds_and_every_request_ends_under_random_load(seed: int) -> None:
    rng = random.Random(seed)
    num_replicas = rng.choice((2, 3))
    replicas = Replicas(
        num_replicas,
        limit=rng.choice((1, 2, 3)),
        max_num_seqs=rng.choice((2, 4)),
        max_model_len=32,
        num_blocks=rng.choice((12, 40)),
        max_overtakes=rng.choice((0, 4)),
        max_preemptions=2,
        classes=create_classes(ageing_steps=10),
        max_steps_in_flight=rng.choice((1, 2)),
    )
    for _ in range(150):
        run = rng.choice(replicas.runs)
        if rng.random() < 0.5:
            tenant, priority = rng.choice("aaab"), rng.choice((-1, 0, 1))
            run.add(create_request(rng.randint(1, 12), tenant=tenant, priority=priority, max_tokens=rng.randint(1, 12)))
        if rng.random() < 0.2 and run.requests:
            run.abort(rng.choice(run.requests))
        if rng.random() < 0.1 and run.requests:
            run.scheduler.set_priority(rng.choice(run.requests), rng.choice((-1, 0, 1)))
        replicas.step(rng.randrange(num_replicas))
    replicas.finish()


def test_migrating_request_always_counts_against_the_tenant_limit() -> None:
    replicas = Replicas(2, limit=1, max_num_seqs=4)
    source, target = replicas.runs
    first, second = (create_request(6, request_id=name, tenant="a", max_tokens=6) for name in ("first", "second"))
    first.wants_migration = True
    source.add(first, second)
    while not first.is_migrating:
        replicas.step(0)
    moved = continuation_of(first, source.scheduler.migrate_out(first))
    replicas.accounting.tenant_slots.start_migration("first", "a")
    replicas.step(0)
    assert not source.scheduler.running, "its slot migrates with the request"
    replicas.accounting.tenant_slots.finish_migration(1, "first")
    target.scheduler.add(moved)
    replicas.step(1)
    replicas.step(0)
    assert (target.scheduler.running, source.scheduler.running) == ([moved], [])
    target.scheduler.finish(moved, FinishReason.ABORT)
    replicas.step(1)
    replicas.step(0)
    assert source.scheduler.running == [second]


def server(replicas: int) -> Simulation:
    """Return a simulated server whose tenants may run two requests each and send more."""
    rng = random.Random(replicas)
    requests = [
        WorkloadRequest("s", rng.uniform(0, 2), [3 + rng.randrange(9)] * 20, 16, 16, tenant=rng.choice("aab"))
        for _ in range(40)
    ]
    load = Workload("tests", (WorkloadStream("s", sorted(requests, key=lambda each: each.due_s)),), vocab_size=100)
    config = config_with(cluster_config__replicas=replicas, scheduler_config__max_running_per_tenant=2)
    return Simulation(config, load, create_profile())


@pytest.mark.parametrize("replicas", [2, 3])
def test_server_keeps_the_tenant_limit_while_clients_connect_and_disconnect(
    replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = server(replicas)
    step, most = VirtualReplica.step, dict.fromkeys("ab", 0)

    def watched(self: VirtualReplica) -> Any:
        result = step(self)
        everybody: list[Request] = [each for one in simulation._replicas for each in one.engine.scheduler.running]
        for tenant in most:
            most[tenant] = max(most[tenant], sum(each.tenant == tenant for each in everybody))
        return result

    monkeypatch.setattr(VirtualReplica, "step", watched)
    result = simulation.run()
    assert all(each.ok for each in result.outcomes)
    assert most == {"a": 2, "b": 2}
    assert result.bound_violations == 0
    assert not any(simulation._counters.num_shares_broken.values())


def test_monitor_counts_slots_that_are_leased_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def requested_slots(self: TenantSlots, replica: int, demands: Mapping[str, SlotDemand]) -> Mapping[str, int]:
        return {name: each.num_active + each.num_waiting - each.num_leased for name, each in demands.items()}

    monkeypatch.setattr(TenantSlots, "exchange", requested_slots)
    simulation = server(2)
    simulation.run()
    assert simulation._counters.num_shares_broken["tenant_limit"] > 0


def test_monitor_counts_requests_above_the_limit_under_which_they_started() -> None:
    monitor = LimitMonitor()

    def begin(limit: int | None, count: int = 1) -> int:
        requests = [create_request(4, tenant="a") for _ in range(count)]
        begun.extend(requests)
        return monitor.record_started(requests, create_scheduler(max_running_per_tenant=limit).limits)

    begun: list[Request] = []
    assert begin(2, 3) == 1
    for request in begun:
        request.status = RequestStatus.FINISHED
    assert begin(2, 2) == 0
    assert begin(1, 1) == 0
    assert begin(1, 1) == 1
    assert begin(None, 9) == 0


def test_monitor_ignores_a_request_that_held_a_slot_before_a_reload() -> None:
    monitor, limits = LimitMonitor(), create_scheduler(max_running_per_tenant=1).limits
    first, migrating, other, late, last = (create_request(4, tenant="a") for _ in range(5))
    for replica in (0, 1):
        monitor.join(replica)
    assert monitor.record_started([first], limits) == 0
    # A reload removes the limit and a second one restores it; `other` holds a slot and has not started, `migrating`
    # migrates.
    for number in (1, 2):
        monitor.record_reload(0, [other.request_id, migrating.request_id], number)
    assert monitor.record_started([other], limits) == 0
    assert monitor.record_migrated(late, limits) == 0, "the second replica uses older rules"
    for number in (1, 2):
        monitor.record_reload(1, [], number)
    assert monitor.record_migrated(migrating, limits) == 0
    assert monitor.record_started([last], limits) == 0
    assert monitor.record_started([create_request(4, tenant="a")], limits) == 1
    assert monitor.record_migrated(create_request(4, tenant="a"), limits) == 1


def test_tenant_slots_hold_no_reference_to_finished_requests() -> None:
    monitor, request = LimitMonitor(), create_request(4, tenant="a")
    monitor.record_started([request], create_scheduler(max_running_per_tenant=1).limits)
    request.status, kept = RequestStatus.FINISHED, weakref.ref(request)
    del request
    assert kept() is None


def test_tenants_without_requests_are_dropped() -> None:
    monitor, limits = LimitMonitor(), create_scheduler(max_running_per_tenant=1).limits
    stays = create_request(4, tenant="stays")
    assert monitor.record_started([stays], limits) == 0
    for number in range(1000):
        request = create_request(4, tenant=str(number))
        assert monitor.record_started([request], limits) == 0
        request.status = RequestStatus.FINISHED
        assert len(monitor._tenants) <= 2 * MIN_TENANTS
    assert monitor.record_started([create_request(4, tenant="stays")], limits) == 1
