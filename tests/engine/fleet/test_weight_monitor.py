"""Whether classes have their weights' shares is watched apart from what deals them out, so a fault there is counted."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import pytest
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.monitors import ClassStanding, WeightMonitor, held_in, service_of
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler.fair_sharing import SCALE, ClassUsage, WeightedFairSharing
from support.factories import create_classes, create_request, create_scheduler

PRIORITIES = {"high": -1, "low": 1}
"""Of weights 4 and 1."""
NUM_PLACES = 4
LONG = 1000
"""Steps after which a fault is nothing else: until then a class that had more before could be paying that back."""
BOTH, HIGHER = ["high", "low"], ["high"]


def num_broken(*wanted: list[str], num_steps: int = LONG) -> int:
    """What is counted at schedulers that step in turns; of each the classes that always want more there."""
    schedulers = [
        create_scheduler(
            policy="mixed",
            max_num_seqs=NUM_PLACES,
            max_num_batched_tokens=16,
            max_prefill_seqs=NUM_PLACES,
            num_blocks=12,
            max_model_len=8,
            quantum_steps=1,
            classes=create_classes(ageing_steps=8)[::2],
            num_schedulers=len(wanted),
        )
        for _ in wanted
    ]
    ledger, monitors = FleetAccounting(), [WeightMonitor(each) for each in schedulers]
    for index in range(len(wanted)):
        ledger.join(index)
    return sum(
        _step(ledger, index, scheduler, monitors[index], wanted[index])
        for _ in range(num_steps)
        for index, scheduler in enumerate(schedulers)
    )


def _step(ledger: FleetAccounting, index: int, scheduler: Scheduler, monitor: WeightMonitor, wanted: list[str]) -> int:
    for name in wanted:
        for _ in range(len(scheduler.waiting.queues[name]), NUM_PLACES):
            scheduler.add(create_request(2, max_tokens=4, priority=PRIORITIES[name]))
    if (ahead := ledger.classes.take_ahead(index)) is not None:
        scheduler.deprioritize(ahead)
    schedule, paid = scheduler.schedule(0.0), scheduler.pop_class_usage()
    assert schedule is not None and paid is not None
    held = held_in(schedule, scheduler)
    num_broken = monitor.formed(schedule, ledger.charge(index, paid, service_of(held, scheduler)), held)
    scheduler.update(schedule, [7] * schedule.num_samples)
    return num_broken


@pytest.mark.parametrize("wanted", [[BOTH], [BOTH, HIGHER]])
def test_nothing_is_counted_while_shares_hold(wanted: list[list[str]]) -> None:
    assert num_broken(*wanted) == 0


def test_a_scheduler_that_looks_at_ranks_alone_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def highest(self: WeightedFairSharing, waiting: Collection[str], *_: Mapping[str, int]) -> str | None:
        return next((name for name in self.contenders if name in waiting), None)

    monkeypatch.setattr(WeightedFairSharing, "next_class", highest)
    assert num_broken(BOTH) > 0


def test_a_scheduler_for_which_whoever_is_ahead_counts_whole_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightedFairSharing, "_scale", lambda self, name: SCALE // self._weights[name])
    assert num_broken(BOTH, HIGHER) > 0


def test_whoever_is_told_of_nobody_ahead_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "deprioritize", lambda self, names: None)
    assert num_broken(BOTH, HIGHER) > 0


def test_a_replica_is_told_the_least_and_the_most_of_each_lead_since_it_asked_before() -> None:
    rng = random.Random(0)
    standing, leads, asked = ClassStanding(), list[dict[str, int]](), dict[int, int]()
    for _ in range(3000):
        replica = rng.randrange(5)
        if rng.random() < 0.02:
            standing.leave(replica)
            asked.pop(replica, None)
        service = {name: rng.choice((0, 1, 5)) for name in "abc"}
        paid = {name: ClassUsage(service[name], 3, rng.random() < 0.5) for name in "abc"}
        told = standing.tell(replica, service, paid)
        leads.append({name: standing._leads[name] for name in "abc"})
        since = leads[asked[replica] :] if replica in asked else []
        assert told == {
            name: (min(each[name] for each in since), max(each[name] for each in since)) for name in "abc" if since
        }
        asked[replica] = len(leads) - 1
    assert len({each["a"] for each in leads}) > 5
