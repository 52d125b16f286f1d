"""The monitor of class weights is independent of the scheduler, so a fault of the scheduler is counted."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import pytest
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.monitors import WeightMonitor, step_shares, weighted_service
from llm_serving.engine.fleet.sharing import ClassDemand, ClassLeadMonitor
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler.fair_sharing import SCALE, ClassUsage, WeightedFairSharing
from support.factories import create_classes, create_request, create_scheduler

PRIORITIES = {"high": -1, "low": 1}
"""Their weights are 4 and 1."""
NUM_SLOTS = 4
LONG = 1000
"""Steps after which a violation is certain: until then a class could be repaying earlier service."""
BOTH, HIGHER = ["high", "low"], ["high"]


def num_violations(*demand: list[str], num_steps: int = LONG) -> int:
    """Return the violations counted on schedulers stepped one after the other; `demand`: their classes with demand."""
    schedulers = [
        create_scheduler(
            policy="mixed",
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=16,
            max_prefill_seqs=NUM_SLOTS,
            num_blocks=12,
            max_model_len=8,
            quantum_steps=1,
            classes=create_classes(ageing_steps=8)[::2],
            num_schedulers=len(demand),
        )
        for _ in demand
    ]
    accounting, monitors = FleetAccounting(), [WeightMonitor(each) for each in schedulers]
    for index in range(len(demand)):
        accounting.join(index)
    return sum(
        _step(accounting, index, scheduler, monitors[index], demand[index])
        for _ in range(num_steps)
        for index, scheduler in enumerate(schedulers)
    )


def _step(
    accounting: FleetAccounting, index: int, scheduler: Scheduler, monitor: WeightMonitor, demand: list[str]
) -> int:
    for name in demand:
        for _ in range(len(scheduler.waiting.queues[name]), NUM_SLOTS):
            scheduler.add(create_request(2, max_tokens=4, priority=PRIORITIES[name]))
    if (exceeding := accounting.class_usage.pop_exceeding(index)) is not None:
        scheduler.deprioritize(exceeding)
    schedule, usage = scheduler.schedule(0.0), scheduler.pop_class_usage()
    assert schedule is not None and usage is not None
    shares = step_shares(schedule, scheduler)
    leads = accounting.class_usage.charge(index, usage, weighted_service(shares, scheduler))
    num_violations = monitor.count_violations(schedule, leads, shares)
    scheduler.update(schedule, [7] * schedule.num_samples)
    return num_violations


@pytest.mark.parametrize("demand", [[BOTH], [BOTH, HIGHER]])
def test_class_weight_monitor_counts_nothing_while_shares_hold(demand: list[list[str]]) -> None:
    assert num_violations(*demand) == 0


def test_class_weight_monitor_counts_a_scheduler_that_ignores_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def highest(self: WeightedFairSharing, waiting: Collection[str], *_: Mapping[str, int]) -> str | None:
        return next((name for name in self.contenders if name in waiting), None)

    monkeypatch.setattr(WeightedFairSharing, "next_class", highest)
    assert num_violations(BOTH) > 0


def test_class_weight_monitor_counts_a_scheduler_that_keeps_the_weight_of_exceeding_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightedFairSharing, "_scale", lambda self, name: SCALE // self._weights[name])
    assert num_violations(BOTH, HIGHER) > 0


def test_class_weight_monitor_counts_a_scheduler_that_deprioritizes_no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "deprioritize", lambda self, names: None)
    assert num_violations(BOTH, HIGHER) > 0


def test_class_lead_monitor_returns_the_range_of_each_lead_since_the_last_record() -> None:
    rng = random.Random(0)
    monitor, demand = ClassLeadMonitor(), ClassDemand()
    leads, last_records = list[dict[str, int]](), dict[int, int]()
    for _ in range(3000):
        replica = rng.randrange(5)
        if rng.random() < 0.02:
            monitor.leave(replica)
            demand.leave(replica)
            last_records.pop(replica, None)
        service = {name: rng.choice((0, 1, 5)) for name in "abc"}
        usage = {name: ClassUsage(service[name], 3, rng.random() < 0.5) for name in "abc"}
        demand.update(replica, usage)
        ranges = monitor.record(replica, service, usage, demand)
        leads.append({name: monitor._leads[name] for name in "abc"})
        since = leads[last_records[replica] :] if replica in last_records else []
        assert ranges == {
            name: (min(each[name] for each in since), max(each[name] for each in since)) for name in "abc" if since
        }
        last_records[replica] = len(leads) - 1
    assert len({each["a"] for each in leads}) > 5
