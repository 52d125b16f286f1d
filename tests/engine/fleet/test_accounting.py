"""A tenant with requests on several replicas gets the share of one tenant."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from llm_serving.core.request_class import Caller, class_of
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.fleet import accounting as accounting_module
from llm_serving.engine.fleet.accounting import FleetAccounting, Service
from llm_serving.scheduler.fair_sharing import OUTPUT_TOKEN_WEIGHT
from support.async_engine_setup import Setup
from support.factories import create_classes, create_request, create_scheduler
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun

STANDARD = "standard"


def remote_service(accounting: FleetAccounting, replica: int) -> Service:
    """Return the service that a replica gets if it takes its snapshot now."""
    accounting.tenant_usage.take_snapshot(replica)
    return accounting.tenant_usage.pop_remote(replica)


class Replicas:
    """Schedulers stepped one after the other, whose tenants always have more requests than there are slots."""

    def __init__(self, tenants: Sequence[str], shared: bool = True, num_slots: int = 2) -> None:
        """`tenants`: for each replica the tenants that send requests to it, one letter each."""
        self.accounting = FleetAccounting()
        self.tenants = tenants
        self.num_slots = num_slots
        self.served = dict.fromkeys("".join(tenants), 0)
        self.runs = [
            SchedulerRun(
                create_scheduler(
                    policy="mixed",
                    max_overtakes=10**6,
                    max_num_seqs=num_slots,
                    classes=create_classes()[:1],
                    num_schedulers=len(tenants),
                )
            )
            for _ in tenants
        ]
        for index in range(len(tenants) if shared else 0):
            self.accounting.join(index)

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for index, run in enumerate(self.runs):
                self._step(index, run)

    def _step(self, index: int, run: SchedulerRun) -> None:
        for tenant in self.tenants[index]:
            waiting = sum(each.tenant == tenant for each in run.scheduler.waiting)
            run.add(*(create_request(4, max_tokens=4, tenant=tenant) for _ in range(waiting, self.num_slots + 1)))
        run.scheduler.charge_remote_service(remote_service(self.accounting, index))
        schedule = run.step()
        service = run.scheduler.pop_service()
        self.accounting.tenant_usage.add(index, service)
        assert schedule is not None
        for row in schedule.rows:
            self.served[row.request.tenant] += row.query_len + (OUTPUT_TOKEN_WEIGHT - 1) * row.num_samples
        assert sum(service.values()) == sum(
            row.query_len + (OUTPUT_TOKEN_WEIGHT - 1) * row.num_samples for row in schedule.rows
        )


@pytest.mark.parametrize(
    ("tenants", "shares"),
    [
        (["ab", "a"], {"a": 1, "b": 1}),
        (["ab", "bc", "c"], {"a": 1, "b": 1, "c": 1}),
        (["ab", "ab", "ab"], {"a": 1, "b": 1}),
        # No slot stays idle for the sake of shares: a tenant that is alone on a replica gets all of it.
        (["b", "a", "a"], {"a": 2, "b": 1}),
        (["abc", "a"], {"a": 2, "b": 1, "c": 1}),
    ],
)
def test_tenants_get_max_min_fair_shares_over_all_replicas(tenants: list[str], shares: dict[str, int]) -> None:
    """Max-min fairness: no replica serves a tenant that got more service than another one waiting there."""
    replicas = Replicas(tenants)
    replicas.step(300)
    total = sum(replicas.served.values())
    got = {name: served / total for name, served in replicas.served.items()}
    assert got == pytest.approx({name: share / sum(shares.values()) for name, share in shares.items()}, abs=0.02)


def test_without_accounting_a_tenant_on_two_replicas_gets_three_times_as_much() -> None:
    alone = Replicas(["ab", "a"], shared=False)
    alone.step(300)
    assert alone.served["a"] / alone.served["b"] == pytest.approx(3, rel=0.05)


def test_replay_repeats_remote_service() -> None:
    files, other = MemoryFiles(), FleetAccounting()
    other.join(0)
    other.join(1)
    run = SchedulerRun(create_recorded(files, max_overtakes=100, max_num_seqs=1))
    run.add(*(create_request(tenant=tenant, max_tokens=2) for tenant in "aabb"))
    name, order = run.requests[0].request_class.name, ""
    for _ in range(8):
        other.tenant_usage.add(1, {(name, "a"): 50})
        run.scheduler.charge_remote_service(remote_service(other, 0))
        schedule = run.step()
        assert schedule is not None
        order += "".join(request.tenant for request in schedule.started)
        run.scheduler.pop_service()
    assert order == "bbaa"  # and not "abab"
    (data,) = files.files
    assert replay(data).hash == seal(data)


def test_a_replica_that_joins_later_gets_only_later_service() -> None:
    accounting = FleetAccounting()
    accounting.join(0)
    accounting.tenant_usage.add(0, {(STANDARD, "a"): 5})
    accounting.join(1)
    accounting.tenant_usage.add(0, {(STANDARD, "a"): 7})
    accounting.tenant_usage.add(0, {(STANDARD, "a"): 1, (STANDARD, "b"): 2})
    assert remote_service(accounting, 1) == {(STANDARD, "a"): 8, (STANDARD, "b"): 2}
    assert not remote_service(accounting, 1)
    assert not remote_service(accounting, 0)
    accounting.leave(1)
    accounting.tenant_usage.add(0, {(STANDARD, "a"): 7})
    assert not remote_service(accounting, 1)


def test_number_of_tracked_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting_module, "MAX_TENANTS", 10)
    accounting = FleetAccounting()
    accounting.join(0)
    accounting.join(1)
    for number in range(100):
        accounting.tenant_usage.add(0, {(STANDARD, str(number)): 1})
    assert len(remote_service(accounting, 1)) <= 11


def test_each_replica_gets_the_service_of_the_others_at_its_snapshot() -> None:
    """Replicas join, leave, take snapshots and pop service in random order."""
    rng = random.Random(0)
    accounting, pending, exchanged = (
        FleetAccounting(),
        dict[int, Counter[tuple[str, str]]](),
        dict[int, Counter[tuple[str, str]]](),
    )
    for _ in range(9000):
        replica, act = rng.randrange(6), rng.random()
        if replica not in pending or act < 0.02:
            accounting.join(replica)
            pending[replica], exchanged[replica] = Counter(), Counter()
        elif act < 0.04:
            accounting.leave(replica)
            del pending[replica], exchanged[replica]
        elif act < 0.5:
            service = {(STANDARD, rng.choice("abcdef")): rng.randint(1, 9) for _ in range(rng.randint(0, 3))}
            accounting.tenant_usage.add(replica, service)
            for other in pending.keys() - {replica}:
                pending[other].update(service)
        elif act < 0.75:
            accounting.tenant_usage.take_snapshot(replica)
            exchanged[replica].update(pending.pop(replica))
            pending[replica] = Counter()
        else:
            assert accounting.tenant_usage.pop_remote(replica) == exchanged[replica]
            exchanged[replica] = Counter()


def test_engines_exchange_service() -> None:
    async def run() -> None:
        setup = Setup(num_replicas=2)
        async with setup.running() as engine:
            sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
            first = engine.generate([5] * 9, sampling, Caller(tenant="a"), request_id="a")
            assert [piece async for piece in first]
            # `engines` is in order of loading; candidates are in order of index.
            schedulers = [each.scheduler for _, each in sorted(engine.replicas.engines.items())]
            served = [each.waiting.queues[class_of(0, each.classes).name].token_counters for each in schedulers]
            there = next(index for index, shares in enumerate(served) if shares.served("a"))
            assert served[1 - there].served("a") == 0  # it has had no step since
            engine._router.policy = lambda candidates, predict: [*candidates][1 - there]
            assert [piece async for piece in engine.generate([6], sampling, Caller(tenant="b"), request_id="b")]
            assert served[1 - there].served("a") == served[there].served("a")

    asyncio.run(run())
