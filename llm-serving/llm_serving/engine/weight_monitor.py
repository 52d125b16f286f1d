"""Watches, while the server runs, that classes have their weights' shares of a replica, and of all of them together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from llm_serving.engine.class_account import MOST_TURNS
from llm_serving.engine.extremes import Extremes
from llm_serving.engine.wanting import Wanting
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.fair_share import OUTPUT_TOKEN_WEIGHT
from llm_serving.scheduler.turns import SCALE, WHOLE, Paid


class Lead(NamedTuple):
    """By how much a class has been ahead of its share of all replicas since a replica asked before."""

    least: float
    most: float


_UNKNOWN: Final = Lead(0, math.inf)
"""It may be ahead, and need not."""


class Held(NamedTuple):
    """What a class has of a step: parts of all places, of the tokens and of all blocks, of `WHOLE` each."""

    places: int
    tokens: int
    blocks: int


def held_in(schedule: Schedule, scheduler: Scheduler) -> dict[str, Held]:
    """By class; to be asked before the next step is formed."""
    limits, num_blocks = scheduler.limits, scheduler.blocks.pool.num_blocks
    tokens: Counter[str] = Counter()
    for request, _, query_len, samples, _ in schedule.rows:
        tokens[request.request_class.name] += query_len + (OUTPUT_TOKEN_WEIGHT - samples if samples else 0)
    return {
        name: Held(
            WHOLE * num_places // limits.max_num_seqs,
            WHOLE * tokens[name] // limits.max_num_batched_tokens,
            WHOLE * scheduler.places.blocks_held[name] // num_blocks,
        )
        for name, num_places in scheduler.held.items()
    }


def service_of(held: Mapping[str, Held], scheduler: Scheduler) -> dict[str, int]:
    """The largest of these parts, over the weight of the class."""
    scales = {each.name: SCALE // each.weight for each in scheduler.classes}
    return {name: max(parts) * scales[name] for name, parts in held.items()}


class Standing:
    """What classes have had of all replicas, summed up from what their steps hold. One for all replicas of a master.

    `ClassAccount`, which schedulers go by, sums up what they say that they have charged.
    """

    def __init__(self) -> None:
        self._leads: Counter[str] = Counter()
        self._wanting = Wanting()
        self._history: defaultdict[str, Extremes] = defaultdict(Extremes)
        """By class, its leads after each call of `tell`."""
        self._num_told = 0
        self._told_at: dict[int, tuple[int, Collection[str]]] = {}
        """By replica: the number of its newest call, and the classes that it told of."""

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        return {*self._wanting.replicas, *self._told_at}

    def leave(self, replica: int) -> None:
        """It serves no longer. This and `tell` are not to be called by two threads at once."""
        self._wanting.leave(replica)
        self._told_at.pop(replica, None)

    def tell(self, replica: int, service: Mapping[str, int], paid: Mapping[str, Paid]) -> Mapping[str, Lead]:
        """A replica has formed a step, or has nothing to form one of; returns what it may have gone by meanwhile.

        Args:
            replica: Its index.
            service: Of the step, by class, over weights.
            paid: Who wants more there, and what a turn is.
        """
        self._wanting.tell(replica, paid)
        leads = self._leads
        for name, served in service.items():
            leads[name] += served
        least = min([leads[name] for name in self._wanting.anywhere], default=None)
        self._num_told = now = self._num_told + 1
        for name, each in paid.items():
            lead = 0 if least is None else max(0, leads[name] - least)
            leads[name] = lead = min(lead, MOST_TURNS * each.turn)
            self._history[name].add(now, lead)
        since, names = self._told_at.get(replica, (now, ()))
        self._told_at[replica] = now, tuple(paid)
        return {name: Lead(*self._history[name].since(since)) for name in names}


class WeightMonitor:
    """Of one replica: counts how often a class is given places there that were due to another one.

    While somebody of a class waits, and the class holds less than its share, nobody of a class that has had more since
    then, by their weights, is given a place. What they have had is summed up here from what steps hold; that of a class
    which is ahead of its share of all replicas counts as many times as much as it pays. Whoever waits may have had more
    before that: nothing is counted as long as the bound on its wait leaves time to pay that back.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.waiting
        self._more: dict[tuple[str, str], list[int]] = {}
        """(class, one that waits) -> places, tokens, blocks that the former has had more, over weights."""

    def formed(self, schedule: Schedule, leads: Mapping[str, Lead], held: Mapping[str, Held] | None = None) -> int:
        """How many pairs of classes a step shows this of; `held`: what is held in it, if that is known already."""
        scheduler = self._scheduler
        if scheduler.waiting is not self._queue:  # it goes on by other rules
            self._queue, self._more = scheduler.waiting, {}
        contenders = self._queue.turns.contenders
        waiting = [name for name in contenders if self._waits(name)] if len(contenders) > 1 else []
        if not waiting:
            self._more = {}
            return 0
        pairs = [(one, other) for other in waiting for one in contenders if one != other]
        self._more = {pair: self._more.get(pair, [0, 0, 0]) for pair in pairs}
        admitted = {row[0].request_class.name for row in schedule.rows if row[0].running_since[0] == schedule.step}
        num_broken = 0
        if admitted and not schedule.preempted:
            num_broken = sum(one in admitted and self._was_due(one, other, leads) for one, other in pairs)
        held, limits = held_in(schedule, scheduler) if held is None else held, scheduler.limits
        weights = {each.name: each.weight for each in scheduler.classes}
        turn = limits.turn_steps * WHOLE
        for one, other in pairs:
            mine, others = SCALE // weights[one], SCALE // weights[other]
            if leads.get(one, _UNKNOWN).least > turn * mine:
                mine *= limits.least_part
            if 2 * leads.get(other, _UNKNOWN).most > turn * others:
                others *= limits.least_part
            more = zip(self._more[one, other], held[one], strict=True)
            self._more[one, other] = [max(0, before + part * mine - max(held[other]) * others) for before, part in more]
        return num_broken

    def _waits(self, name: str) -> bool:
        """Whether somebody of a class waits that may be given a place."""
        queue = self._queue.queues[name]
        return len(queue) > 0 and name not in self._scheduler.closed and queue.arrival_clock() is not None

    def _was_due(self, one: str, other: str, leads: Mapping[str, Lead]) -> bool:
        """Whether the latter should have had the place that the former was given."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        weights = {each.name: each.weight for each in scheduler.classes}
        first_steps = next(each.first_steps for each in scheduler.bounds if each.name == other)
        tolerance = first_steps * WHOLE * (SCALE // weights[one]) * limits.least_part
        if max(self._more[one, other]) <= tolerance:
            return False
        is_ahead = 2 * leads.get(other, _UNKNOWN).most > limits.turn_steps * WHOLE * (SCALE // weights[other])
        part = weights[other] * (1 if is_ahead else limits.least_part)
        total = part + limits.least_part * sum(weights[each] for each in self._queue.turns.contenders if each != other)
        num_blocks = scheduler.places.blocks_held[other]
        return (
            scheduler.held[other] * total < limits.max_num_seqs * part
            and num_blocks * total < scheduler.blocks.pool.num_blocks * part
        )
