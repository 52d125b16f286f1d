"""Monitors that compare what was served with the rules: weights of classes, and limits of tenants across replicas."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.engine.fleet.class_shares import MOST_TURNS, ClassDemand, Extremes
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.fair_sharing import FULL_STEP, SCALE, ClassUsage
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import OUTPUT_TOKEN_WEIGHT

MIN_TENANTS: Final = 64
"""Tenants below which the table is not searched for tenants without requests."""


class ClassLead(NamedTuple):
    """By how much a class has been ahead of its share of all replicas since a replica asked before."""

    least: float
    most: float


_UNKNOWN: Final = ClassLead(0, math.inf)
"""It may be ahead, and need not."""


class Held(NamedTuple):
    """What a class has of a step: parts of all places, of the tokens and of all blocks, in units of `FULL_STEP`."""

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
            FULL_STEP * num_places // limits.max_num_seqs,
            FULL_STEP * tokens[name] // limits.max_num_batched_tokens,
            FULL_STEP * scheduler.slots.blocks_by_class[name] // num_blocks,
        )
        for name, num_places in scheduler.slots_by_class.items()
    }


def service_of(held: Mapping[str, Held], scheduler: Scheduler) -> dict[str, int]:
    """The largest of these parts, over the weight of the class."""
    scales = {each.name: SCALE // each.weight for each in scheduler.classes}
    return {name: max(parts) * scales[name] for name, parts in held.items()}


class ClassStanding:
    """What classes have had of all replicas, summed up from what their steps hold. One for all replicas of a master.

    `ClassAccount`, which schedulers go by, sums up what they say that they have charged.
    """

    def __init__(self) -> None:
        self._leads: Counter[str] = Counter()
        self._wanting = ClassDemand()
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

    def tell(self, replica: int, service: Mapping[str, int], paid: Mapping[str, ClassUsage]) -> Mapping[str, ClassLead]:
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
            leads[name] = lead = min(lead, MOST_TURNS * each.quantum)
            self._history[name].add(now, lead)
        since, names = self._told_at.get(replica, (now, ()))
        self._told_at[replica] = now, tuple(paid)
        return {name: ClassLead(*self._history[name].since(since)) for name in names}


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

    def formed(self, schedule: Schedule, leads: Mapping[str, ClassLead], held: Mapping[str, Held] | None = None) -> int:
        """How many pairs of classes a step shows this of; `held`: what is held in it, if that is known already."""
        scheduler = self._scheduler
        if scheduler.waiting is not self._queue:  # it goes on by other rules
            self._queue, self._more = scheduler.waiting, {}
        contenders = self._queue.sharing.contenders
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
        turn = limits.quantum_steps * FULL_STEP
        for one, other in pairs:
            mine, others = SCALE // weights[one], SCALE // weights[other]
            if leads.get(one, _UNKNOWN).least > turn * mine:
                mine *= limits.weight_divisor
            if 2 * leads.get(other, _UNKNOWN).most > turn * others:
                others *= limits.weight_divisor
            more = zip(self._more[one, other], held[one], strict=True)
            self._more[one, other] = [max(0, before + part * mine - max(held[other]) * others) for before, part in more]
        return num_broken

    def _waits(self, name: str) -> bool:
        """Whether somebody of a class waits that may be given a place."""
        queue = self._queue.queues[name]
        return len(queue) > 0 and name not in self._scheduler.closed_classes and queue.arrival_clock() is not None

    def _was_due(self, one: str, other: str, leads: Mapping[str, ClassLead]) -> bool:
        """Whether the latter should have had the place that the former was given."""
        scheduler, limits = self._scheduler, self._scheduler.limits
        weights = {each.name: each.weight for each in scheduler.classes}
        first_steps = next(each.first_steps for each in scheduler.bounds if each.name == other)
        tolerance = first_steps * FULL_STEP * (SCALE // weights[one]) * limits.weight_divisor
        if max(self._more[one, other]) <= tolerance:
            return False
        is_ahead = 2 * leads.get(other, _UNKNOWN).most > limits.quantum_steps * FULL_STEP * (SCALE // weights[other])
        part = weights[other] * (1 if is_ahead else limits.weight_divisor)
        total = part + limits.weight_divisor * sum(
            weights[each] for each in self._queue.sharing.contenders if each != other
        )
        num_blocks = scheduler.slots.blocks_by_class[other]
        return (
            scheduler.slots_by_class[other] * total < limits.max_num_seqs * part
            and num_blocks * total < scheduler.blocks.pool.num_blocks * part
        )


class _Tenant(NamedTuple):
    limit: int
    begun: list[weakref.ref[Request]]
    """Since that is its limit; of those that have ended some linger, without what they had."""


class LimitMonitor:
    """One for all replicas of a master; each engine's thread tells whom a step gives a place for the first time.

    It knows nothing of how places are dealt out, only the limit, who has begun and who has ended. Beams of a search
    all run, so searches do not count. Where a limit may be another one than before, whoever has a place keeps it, also
    between two replicas, and those that are given one from then on count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._most_tenants = MIN_TENANTS
        self._rules: dict[int, int] = {}
        """By replica: how often the server had other rules, until it had those that the replica goes by."""
        self._kept: dict[int, set[str]] = {}
        """By replica, when it took over its rules: requests with places of which the first step had not been told."""

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        return {*self._rules, *self._kept}

    def join(self, replica: int, number: int = 0) -> None:
        """It begins to serve, by these rules of the server."""
        with self._lock:
            self._rules[replica] = number
            self._kept.pop(replica, None)

    def leave(self, replica: int) -> None:
        with self._lock:
            self._rules.pop(replica, None)
            self._kept.pop(replica, None)

    def reloaded(self, replica: int, kept: Iterable[str], number: int) -> None:
        """It goes by these rules of the server from now on; these requests have places by those before, and are to be
        told of yet."""
        with self._lock:
            self._rules[replica] = number
            self._kept[replica] = {*kept}
            self._tenants.clear()

    def begun(self, requests: Iterable[Request], limits: SchedulerLimits) -> int:
        """These were given places at a replica; returns how many should not have been."""
        num_beyond = 0
        with self._lock:
            for request in requests:
                limit = limits.max_running_of_tenant.get(request.tenant, limits.max_running_per_tenant)
                is_kept = self._was_kept(request.request_id)
                if limit is not None and not (
                    is_kept or request.is_beam or request.root_request.beam_search is not None
                ):
                    num_beyond += self._add(request, limit)
        return num_beyond

    def arrived(self, request: Request, limits: SchedulerLimits) -> int:
        """As `begun`, of one that has come from another replica, which may go by older rules still."""
        if len({*self._rules.values()}) > 1:
            return 0
        return self.begun([request], limits)

    def _was_kept(self, request_id: str) -> bool:
        """Once of each."""
        found = [kept for kept in self._kept.values() if request_id in kept]
        for kept in found:
            kept.discard(request_id)
        return bool(found)

    def _add(self, request: Request, limit: int) -> bool:
        tenant = self._tenants.get(request.tenant)
        running = [] if tenant is None or tenant.limit != limit else _running(tenant)
        self._tenants[request.tenant] = _Tenant(limit, [*running, weakref.ref(request)])
        if len(self._tenants) > self._most_tenants:
            self._tenants = {name: each for name, each in self._tenants.items() if _running(each)}
            self._most_tenants = 2 * len(self._tenants) + MIN_TENANTS
        return len(running) >= limit


def _running(tenant: _Tenant) -> list[weakref.ref[Request]]:
    return [each for each in tenant.begun if (request := each()) is not None and not request.is_finished]
