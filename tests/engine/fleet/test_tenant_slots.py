"""A tenant's `max_running` is one of the whole, however many replicas it asks."""

from __future__ import annotations

import random
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.migration import as_it_goes_on
from llm_serving.engine.fleet.monitors import MIN_TENANTS, LimitMonitor
from llm_serving.engine.fleet.tenant_slots import TenantSlots
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.scheduler.tenant_limits import SlotDemand
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.virtual_replica import VirtualReplica
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream
from support.factories import create_classes, create_request, create_scheduler
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun
from support.simulator_workloads import config_with, create_profile


class Places:
    """Replicas that need places of tenant `a`, and take what they are dealt."""

    def __init__(self, limit: int, num_replicas: int) -> None:
        self.places, self.limit = TenantSlots(), limit
        self.held = [0] * num_replicas
        self.nudged: list[int] = []
        for index in range(num_replicas):
            self.places.join(index, lambda index=index: self.nudged.append(index))  # type: ignore[misc]

    def tell(self, replica: int, num_active: int, num_wanted: int, part: int | None = None) -> list[int]:
        """What each holds after a replica has told its needs, and the nudged ones have asked what they got."""
        need = SlotDemand(self.limit, self.held[replica] if part is None else part, num_active, num_wanted)
        self.held[replica] = need.num_leased
        self._take(replica, {"a": need})
        while self.nudged:
            self._take(self.nudged.pop(0), {})
        return self.held

    def _take(self, replica: int, needs: Mapping[str, SlotDemand]) -> None:
        self.held[replica] += self.places.settle(replica, needs).get("a", 0)
        for tenant in self.places._tenants.values():
            assert tenant.num_held == sum(map(tenant.held, tenant.needs))


def test_who_asks_first_gets_what_it_needs_and_others_what_is_left() -> None:
    places = Places(limit=3, num_replicas=2)
    assert places.tell(0, 0, 2) == [2, 0]
    assert places.tell(1, 0, 5) == [2, 1]


def test_a_place_that_is_given_back_goes_to_whoever_holds_the_fewest() -> None:
    places = Places(limit=3, num_replicas=2)
    assert places.tell(0, 0, 9) == [3, 0]
    places.tell(0, 3, 6)
    assert places.tell(1, 0, 9) == [3, 0]
    assert places.tell(0, 2, 6, part=2) == [2, 1]
    assert places.tell(0, 1, 6, part=1) == [2, 1], "whoever holds no more gets it back"


def test_a_single_place_goes_round() -> None:
    places = Places(limit=1, num_replicas=3)
    places.tell(0, 0, 5)
    places.tell(0, 1, 4)
    places.tell(1, 0, 5)
    places.tell(2, 0, 5)
    order = []
    for _ in range(6):
        holder = places.held.index(1)
        order.append(holder)
        places.tell(holder, 1, 4)
        places.tell(holder, 0, 4, part=0)
    assert order == [0, 1, 2, 0, 1, 2]


def test_what_nobody_needs_any_more_is_given_back() -> None:
    places = Places(limit=2, num_replicas=2)
    places.tell(0, 0, 2)
    places.tell(1, 0, 1)
    assert places.tell(0, 0, 1) == [1, 1]
    assert places.tell(0, 0, 0) == [0, 1]
    assert places.tell(1, 1, 0) == [0, 1]
    assert places.tell(1, 0, 0, part=0) == [0, 0]
    assert not places.places._tenants


def test_a_replica_that_leaves_gives_everything_back() -> None:
    places = Places(limit=2, num_replicas=2)
    places.tell(0, 0, 2)
    places.tell(0, 2, 0)
    assert places.tell(1, 0, 2) == [2, 0]
    places.places.leave(0)
    assert places.nudged == [1]
    assert places.tell(1, 0, 2) == [2, 2]


def test_a_lower_limit_takes_back_what_is_not_used() -> None:
    places = Places(limit=4, num_replicas=2)
    places.tell(0, 0, 4)
    places.tell(0, 2, 2)
    places.limit = 1
    assert places.tell(0, 2, 2)[0] == 2
    places.tell(1, 0, 1)
    assert places.tell(0, 1, 2, part=1) == [1, 0]
    assert places.tell(0, 0, 2, part=0) == [0, 1]


def test_a_lower_limit_takes_back_what_another_replica_has_not_used_before_it_knows_of_it() -> None:
    places = Places(limit=4, num_replicas=2)
    places.tell(0, 0, 3)
    places.limit = 1
    places.tell(1, 0, 1)
    places._take(0, {})
    assert places.held == [1, 0]


def test_a_request_on_its_way_keeps_its_place() -> None:
    places = Places(limit=1, num_replicas=2)
    places.tell(0, 0, 2)
    places.tell(0, 1, 1)
    places.places.depart("r", "a")
    assert places.tell(0, 0, 1, part=0) == [0, 0]
    places.places.arrive(1, "r")
    assert places.tell(1, 1, 0, part=1) == [0, 1]
    assert places.tell(1, 0, 0, part=0) == [1, 0]


def test_a_request_that_ends_on_its_way_gives_its_place_back() -> None:
    places = Places(limit=1, num_replicas=2)
    places.tell(0, 0, 2)
    places.tell(0, 1, 1)
    places.places.depart("r", "a")
    places.tell(0, 0, 1, part=0)
    places.places.forget("r")
    assert places.nudged == [0]
    assert places.tell(0, 0, 1) == [1, 0]


class Replicas:
    """Schedulers of one master that step in turns, recorded."""

    def __init__(self, num_replicas: int, limit: int, **options: object) -> None:
        self.limit, self.ledger = limit, FleetAccounting()
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
            self.ledger.join(index)

    def step(self, index: int) -> None:
        scheduler = self.runs[index].scheduler
        if places := self.ledger.places.settle(index, scheduler.pop_tenant_demand()):
            scheduler.adjust_tenant_leases(places)
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
def test_a_tenant_runs_no_more_at_several_replicas_than_at_one(num_replicas: int) -> None:
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
def test_whatever_comes_no_more_run_and_nobody_waits_for_ever(seed: int) -> None:
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


def test_a_request_that_moves_counts_all_the_time() -> None:
    replicas = Replicas(2, limit=1, max_num_seqs=4)
    source, target = replicas.runs
    first, second = (create_request(6, request_id=name, tenant="a", max_tokens=6) for name in ("first", "second"))
    first.wants_migration = True
    source.add(first, second)
    while not first.is_migrating:
        replicas.step(0)
    moved = as_it_goes_on(first, source.scheduler.migrate_out(first))
    replicas.ledger.places.depart("first", "a")
    replicas.step(0)
    assert not source.scheduler.running, "its place is on the way"
    replicas.ledger.places.arrive(1, "first")
    target.scheduler.add(moved)
    replicas.step(1)
    replicas.step(0)
    assert (target.scheduler.running, source.scheduler.running) == ([moved], [])
    target.scheduler.finish(moved, FinishReason.ABORT)
    replicas.step(1)
    replicas.step(0)
    assert source.scheduler.running == [second]


def server(replicas: int) -> Simulation:
    """Of tenants who run two requests at most, and more of whose come and go."""
    rng = random.Random(replicas)
    requests = [
        WorkloadRequest("s", rng.uniform(0, 2), [3 + rng.randrange(9)] * 20, 16, 16, tenant=rng.choice("aab"))
        for _ in range(40)
    ]
    load = Workload("tests", (WorkloadStream("s", sorted(requests, key=lambda each: each.due_s)),), vocab_size=100)
    config = config_with(cluster_config__replicas=replicas, scheduler_config__max_running_per_tenant=2)
    return Simulation(config, load, create_profile())


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_server_keeps_to_it_while_clients_come_and_go(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_places_that_are_dealt_twice_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wanted(self: TenantSlots, replica: int, needs: Mapping[str, SlotDemand]) -> Mapping[str, int]:
        return {name: need.num_active + need.num_waiting - need.num_leased for name, need in needs.items()}

    monkeypatch.setattr(TenantSlots, "settle", wanted)
    simulation = server(2)
    simulation.run()
    assert simulation._counters.num_shares_broken["tenant_limit"] > 0


def test_who_begins_beyond_a_limit_is_counted_and_whoever_had_begun_before_it_changed_is_not() -> None:
    monitor = LimitMonitor()

    def begin(limit: int | None, count: int = 1) -> int:
        requests = [create_request(4, tenant="a") for _ in range(count)]
        begun.extend(requests)
        return monitor.begun(requests, create_scheduler(max_running_per_tenant=limit).limits)

    begun: list[Request] = []
    assert begin(2, 3) == 1
    for request in begun:
        request.status = RequestStatus.FINISHED
    assert begin(2, 2) == 0
    assert begin(1, 1) == 0
    assert begin(1, 1) == 1
    assert begin(None, 9) == 0


def test_whoever_had_a_place_before_the_rules_changed_is_not_counted() -> None:
    monitor, limits = LimitMonitor(), create_scheduler(max_running_per_tenant=1).limits
    first, on_way, other, late, last = (create_request(4, tenant="a") for _ in range(5))
    for replica in (0, 1):
        monitor.join(replica)
    assert monitor.begun([first], limits) == 0
    # No limit for a while, then the same as before; one has a place without a step, another one moves.
    for number in (1, 2):
        monitor.reloaded(0, [other.request_id, on_way.request_id], number)
    assert monitor.begun([other], limits) == 0
    assert monitor.arrived(late, limits) == 0, "the second replica goes by the older rules"
    for number in (1, 2):
        monitor.reloaded(1, [], number)
    assert monitor.arrived(on_way, limits) == 0
    assert monitor.begun([last], limits) == 0
    assert monitor.begun([create_request(4, tenant="a")], limits) == 1
    assert monitor.arrived(create_request(4, tenant="a"), limits) == 1


def test_prompts_of_those_who_have_ended_are_not_kept() -> None:
    monitor, request = LimitMonitor(), create_request(4, tenant="a")
    monitor.begun([request], create_scheduler(max_running_per_tenant=1).limits)
    request.status, kept = RequestStatus.FINISHED, weakref.ref(request)
    del request
    assert kept() is None


def test_tenants_who_have_nobody_left_are_forgotten() -> None:
    monitor, limits = LimitMonitor(), create_scheduler(max_running_per_tenant=1).limits
    stays = create_request(4, tenant="stays")
    assert monitor.begun([stays], limits) == 0
    for number in range(1000):
        request = create_request(4, tenant=str(number))
        assert monitor.begun([request], limits) == 0
        request.status = RequestStatus.FINISHED
        assert len(monitor._tenants) <= 2 * MIN_TENANTS
    assert monitor.begun([create_request(4, tenant="stays")], limits) == 1
