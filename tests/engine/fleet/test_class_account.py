"""Classes have their weights' shares of all replicas together, whichever of these they come to."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from llm_serving.core.request_class import RequestClass
from llm_serving.engine.fleet.accounting import FleetAccounting
from llm_serving.engine.fleet.class_shares import MOST_TURNS, ClassDemand, FleetClassUsage
from llm_serving.scheduler.fair_sharing import ClassUsage
from support.factories import create_classes, create_request
from support.recordings import MemoryFiles, create_recorded, replay, seal
from support.scheduler_run import SchedulerRun

TURN_STEPS = 4
NUM_PLACES = 7
WINDOW = 3 * MOST_TURNS * TURN_STEPS
"""Steps that a promise of shares needs: turns, at every replica."""
PRIORITIES = {"high": -1, "normal": 0, "low": 1}


class Replicas:
    """Schedulers that step in turns, with classes that always have more requests than there are places."""

    def __init__(self, wanted: Sequence[Sequence[str]], classes: Sequence[RequestClass], shared: bool = True) -> None:
        """Of each replica the classes that come there."""
        self.wanted, self.ledger, self.shared = wanted, FleetAccounting(), shared
        self.files = [MemoryFiles() for _ in wanted]
        self.served: list[Mapping[str, int]] = []
        """Of each step of each replica, the places that classes have."""
        self.runs = [
            SchedulerRun(
                create_recorded(
                    files,
                    policy="mixed",
                    max_num_seqs=NUM_PLACES,
                    max_num_batched_tokens=4 * NUM_PLACES,
                    num_blocks=400,
                    max_model_len=16,
                    quantum_steps=TURN_STEPS,
                    classes=classes,
                    num_schedulers=len(wanted),
                )
            )
            for files in self.files
        ]
        for index in range(len(wanted)):
            self.ledger.join(index)

    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for index, run in enumerate(self.runs):
                self._step(index, run)

    def _step(self, index: int, run: SchedulerRun) -> None:
        scheduler = run.scheduler
        for name in self.wanted[index]:
            waiting = len(scheduler.waiting.queues[name])
            requests = [create_request(2, max_tokens=4, priority=PRIORITIES[name]) for _ in range(waiting, NUM_PLACES)]
            run.add(*requests)
        if self.shared and (ahead := self.ledger.classes.take_ahead(index)) is not None:
            scheduler.deprioritize(ahead)
        assert run.step() is not None
        if (paid := scheduler.pop_class_usage()) is not None:
            self.ledger.classes.charge(index, paid)
        self.served.append(dict(scheduler.slots_by_class))

    def shares(self, since: int, until: int | None = None) -> dict[str, float]:
        """Of all places of all replicas, in these steps."""
        num = len(self.runs)
        steps = self.served[since * num : None if until is None else until * num]
        held = {name: sum(each[name] for each in steps) for name in PRIORITIES}
        return {name: number / sum(held.values()) for name, number in held.items() if number}


@pytest.mark.parametrize(
    ("wanted", "shares"),
    [
        ([["high", "low"], ["high"]], {"high": 4, "low": 1}),
        ([["high", "low"], ["high"], ["high"]], {"high": 4, "low": 1}),
        ([["high", "normal", "low"], ["high", "normal"]], {"high": 4, "normal": 2, "low": 1}),
        # Nobody lies idle for the sake of shares, and whoever is ahead keeps a part: here 4 / (4 + 1/4) of one replica.
        ([["high", "low"], ["low"]], {"high": 8, "low": 9}),
    ],
)
def test_shares_are_those_of_the_whole(wanted: list[list[str]], shares: dict[str, float]) -> None:
    replicas = Replicas(wanted, create_classes(ageing_steps=8))
    replicas.step(4 * WINDOW)
    expected = {name: share / sum(shares.values()) for name, share in shares.items()}
    assert replicas.shares(WINDOW) == pytest.approx(expected, abs=0.04)
    for begin in range(WINDOW, 4 * WINDOW, WINDOW):
        assert replicas.shares(begin, begin + WINDOW) == pytest.approx(expected, abs=0.08)
    for run, files in zip(replicas.runs, replicas.files, strict=True):
        run.finish()
        [data] = files.files
        assert replay(data).hash == seal(data)


def test_without_it_a_class_at_two_replicas_takes_what_is_due_to_one_at_one_of_them() -> None:
    replicas = Replicas([["high", "low"], ["high"]], create_classes(ageing_steps=8), shared=False)
    replicas.step(4 * WINDOW)
    assert replicas.shares(WINDOW)["low"] == pytest.approx(0.1, abs=0.02)


def test_a_class_that_is_ahead_here_is_told_until_the_others_have_caught_up() -> None:
    account = FleetClassUsage()
    account.charge(0, {"a": ClassUsage(12, 10, True), "b": ClassUsage(0, 20, True)})
    assert account.take_ahead(0) == {"a"}
    assert account.take_ahead(0) is None
    assert account.take_ahead(1) == {"a"}
    account.charge(1, {"a": ClassUsage(0, 10, False), "b": ClassUsage(6, 20, True)})
    assert account.take_ahead(0) is None, "more than half a turn ahead"
    account.charge(1, {"a": ClassUsage(0, 10, False), "b": ClassUsage(2, 20, True)})
    assert account.take_ahead(0) == frozenset()


def test_what_a_class_had_because_nobody_wanted_it_is_forgotten() -> None:
    account = FleetClassUsage()
    for _ in range(100):
        account.charge(0, {"a": ClassUsage(30, 10, True), "b": ClassUsage(0, 10, False)})
    assert account.take_ahead(0) is None
    for _ in range(100):
        account.charge(0, {"a": ClassUsage(30, 10, True), "b": ClassUsage(0, 10, True)})
    assert account._paid == {"a": MOST_TURNS * 10, "b": 0}
    account.leave(0)
    assert account.take_ahead(0) == {"a"}


def test_a_class_wants_more_as_long_as_it_does_so_at_any_replica() -> None:
    rng = random.Random(0)
    wanting, by_replica = ClassDemand(), dict[int, set[str]]()
    for _ in range(500):
        replica = rng.randrange(4)
        if rng.random() < 0.1:
            wanting.leave(replica)
            by_replica.pop(replica, None)
        else:
            names = {name for name in "abc" if rng.random() < 0.3}
            wanting.tell(replica, {name: ClassUsage(0, 1, name in names) for name in "abc"})
            by_replica[replica] = names
        assert set(wanting.anywhere) == set().union(*by_replica.values())
