"""Classes get the shares of their weights over all replicas together."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from llm_serving.core.request_class import RequestClass
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.sharing import MAX_LEAD_QUANTA, ClassDemand, FleetClassUsage
from llm_serving.scheduler.fair_sharing import ClassUsage
from support.factories import create_classes, create_request
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun

QUANTUM_STEPS = 4
NUM_SLOTS = 7
WINDOW = 3 * MAX_LEAD_QUANTA * QUANTUM_STEPS
"""Steps after which shares must hold: a few quanta of every class."""
PRIORITIES = {"high": -1, "normal": 0, "low": 1}


class Replicas:
    """Schedulers stepped one after the other, whose classes always have more requests than there are slots."""

    def __init__(self, demand: Sequence[Sequence[str]], classes: Sequence[RequestClass], shared: bool = True) -> None:
        """`demand`: for each replica, the classes that have requests there."""
        self.demand, self.accounting, self.shared = demand, FleetAccounting(), shared
        self.files = [MemoryFiles() for _ in demand]
        self.served: list[Mapping[str, int]] = []
        """Slots of each class, in each step of each replica."""
        self.runs = [
            SchedulerRun(
                create_recorded(
                    files,
                    policy="mixed",
                    max_num_seqs=NUM_SLOTS,
                    max_num_batched_tokens=4 * NUM_SLOTS,
                    num_blocks=400,
                    max_model_len=16,
                    quantum_steps=QUANTUM_STEPS,
                    classes=classes,
                    num_schedulers=len(demand),
                )
            )
            for files in self.files
        ]
        for index in range(len(demand)):
            self.accounting.join(index)

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for index, run in enumerate(self.runs):
                self._step(index, run)

    def _step(self, index: int, run: SchedulerRun) -> None:
        scheduler = run.scheduler
        for name in self.demand[index]:
            waiting = len(scheduler.waiting.queues[name])
            requests = [create_request(2, max_tokens=4, priority=PRIORITIES[name]) for _ in range(waiting, NUM_SLOTS)]
            run.add(*requests)
        if self.shared and (exceeding := self.accounting.class_usage.pop_exceeding(index)) is not None:
            scheduler.deprioritize(exceeding)
        assert run.step() is not None
        if (usage := scheduler.pop_class_usage()) is not None:
            self.accounting.class_usage.charge(index, usage, {})
        self.served.append(dict(scheduler.slots_by_class))

    def shares(self, since: int, until: int | None = None) -> dict[str, float]:
        """Return the share of each class of all slots of all replicas, in these steps."""
        num = len(self.runs)
        steps = self.served[since * num : None if until is None else until * num]
        held = {name: sum(each[name] for each in steps) for name in PRIORITIES}
        return {name: number / sum(held.values()) for name, number in held.items() if number}


@pytest.mark.parametrize(
    ("demand", "shares"),
    [
        ([["high", "low"], ["high"]], {"high": 4, "low": 1}),
        ([["high", "low"], ["high"], ["high"]], {"high": 4, "low": 1}),
        ([["high", "normal", "low"], ["high", "normal"]], {"high": 4, "normal": 2, "low": 1}),
        # No slot stays idle, and a class that exceeds its share keeps a part: here 4 / (4 + 1/4) of one replica.
        ([["high", "low"], ["low"]], {"high": 8, "low": 9}),
    ],
)
def test_classes_get_weighted_shares_over_all_replicas(demand: list[list[str]], shares: dict[str, float]) -> None:
    replicas = Replicas(demand, create_classes(ageing_steps=8))
    replicas.step(4 * WINDOW)
    expected = {name: share / sum(shares.values()) for name, share in shares.items()}
    assert replicas.shares(WINDOW) == pytest.approx(expected, abs=0.04)
    for begin in range(WINDOW, 4 * WINDOW, WINDOW):
        assert replicas.shares(begin, begin + WINDOW) == pytest.approx(expected, abs=0.08)
    for run, files in zip(replicas.runs, replicas.files, strict=True):
        run.finish()
        [data] = files.files
        assert replay(data).hash == seal(data)


def test_without_accounting_a_class_on_two_replicas_takes_the_share_of_another() -> None:
    replicas = Replicas([["high", "low"], ["high"]], create_classes(ageing_steps=8), shared=False)
    replicas.step(4 * WINDOW)
    assert replicas.shares(WINDOW)["low"] == pytest.approx(0.1, abs=0.02)


def test_class_is_deprioritized_until_other_classes_have_caught_up() -> None:
    usage = FleetClassUsage()
    usage.charge(0, {"a": ClassUsage(12, 10, True), "b": ClassUsage(0, 20, True)}, {})
    assert usage.pop_exceeding(0) == {"a"}
    assert usage.pop_exceeding(0) is None
    assert usage.pop_exceeding(1) == {"a"}
    usage.charge(1, {"a": ClassUsage(0, 10, False), "b": ClassUsage(6, 20, True)}, {})
    assert usage.pop_exceeding(0) is None, "its lead is more than half a quantum"
    usage.charge(1, {"a": ClassUsage(0, 10, False), "b": ClassUsage(2, 20, True)}, {})
    assert usage.pop_exceeding(0) == frozenset()


def test_service_without_competing_demand_is_not_charged() -> None:
    usage = FleetClassUsage()
    for _ in range(100):
        usage.charge(0, {"a": ClassUsage(30, 10, True), "b": ClassUsage(0, 10, False)}, {})
    assert usage.pop_exceeding(0) is None
    for _ in range(100):
        usage.charge(0, {"a": ClassUsage(30, 10, True), "b": ClassUsage(0, 10, True)}, {})
    assert usage._leads == {"a": MAX_LEAD_QUANTA * 10, "b": 0}
    usage.leave(0)
    assert usage.pop_exceeding(0) == {"a"}


def test_class_demand_is_the_union_over_replicas() -> None:
    rng = random.Random(0)
    demand, by_replica = ClassDemand(), dict[int, set[str]]()
    for _ in range(500):
        replica = rng.randrange(4)
        if rng.random() < 0.1:
            demand.leave(replica)
            by_replica.pop(replica, None)
        else:
            names = {name for name in "abc" if rng.random() < 0.3}
            demand.update(replica, {name: ClassUsage(0, 1, name in names) for name in "abc"})
            by_replica[replica] = names
        assert set(demand.classes) == set().union(*by_replica.values())
