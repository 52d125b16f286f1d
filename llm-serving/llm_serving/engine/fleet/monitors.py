"""Monitors that check, independently of the scheduler, the weights of classes and the limits of tenants."""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.engine.fleet.sharing import ClassLead
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.fair_sharing import FULL_STEP, OUTPUT_TOKEN_WEIGHT, SCALE
from llm_serving.scheduler.limits import SchedulerLimits

MIN_TENANTS: Final = 64

_UNKNOWN: Final = ClassLead(0, math.inf)


class StepShare(NamedTuple):
    """A class's fraction of all running slots, of the token budget and of all blocks. `FULL_STEP` means 100 %."""

    slots: int
    tokens: int
    blocks: int


def step_shares(schedule: Schedule, scheduler: Scheduler) -> dict[str, StepShare]:
    limits, num_blocks = scheduler.limits, scheduler.blocks.pool.num_blocks
    tokens: Counter[str] = Counter()
    for request, _, query_len, samples, _ in schedule.rows:
        tokens[request.request_class.name] += query_len + (OUTPUT_TOKEN_WEIGHT - samples if samples else 0)
    return {
        name: StepShare(
            FULL_STEP * num_slots // limits.max_num_seqs,
            FULL_STEP * tokens[name] // limits.max_num_batched_tokens,
            FULL_STEP * scheduler.slots.blocks_by_class[name] // num_blocks,
        )
        for name, num_slots in scheduler.slots_by_class.items()
    }


def weighted_service(shares: Mapping[str, StepShare], scheduler: Scheduler) -> dict[str, int]:
    scales = {each.name: SCALE // each.weight for each in scheduler.classes}
    return {name: max(share) * scales[name] for name, share in shares.items()}


class WeightMonitor:
    """Counts how often one replica gives a class a running slot to which another class is entitled.

    Class A violates the rule if it gets a slot while class B waits with less than its share, although A has received
    more service, divided by weight, than B since the wait began. The monitor computes service from the contents of
    steps. The weight of a class that exceeds its share across all replicas is divided by `weight_divisor`.

    The service before the wait is unknown. If B had received more than A before, the scheduler rightly serves A first,
    for at most `ClassBounds.first_steps` steps. So A is not counted before it has exceeded B by the service of that
    many steps.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.waiting
        self.excess: dict[tuple[str, str], list[int]] = {}
        """(A, B) -> excess of A over B in slots, tokens and blocks, each divided by weight, since B began to wait."""

    def count_violations(
        self, schedule: Schedule, leads: Mapping[str, ClassLead], shares: Mapping[str, StepShare] | None = None
    ) -> int:
        """Add a step. Return the number of pairs (A, B) that violate the rule of `WeightMonitor`. `leads`: how far each
        class is ahead across all replicas (`FleetClassUsage`). `shares`: result of `step_shares`, if known.
        """
        scheduler = self._scheduler
        if scheduler.waiting is not self._queue:  # a reload has changed the rules
            self._queue, self.excess = scheduler.waiting, {}
        contenders = self._queue.sharing.contenders
        waiting = [name for name in contenders if self._has_waiting(name)] if len(contenders) > 1 else []
        if not waiting:
            self.excess = {}
            return 0
        pairs = [(one, other) for other in waiting for one in contenders if one != other]
        self.excess = {pair: self.excess.get(pair, [0, 0, 0]) for pair in pairs}
        admitted = {row[0].request_class.name for row in schedule.rows if row[0].running_since[0] == schedule.step}
        num_violations = 0
        if admitted and not schedule.preempted:
            num_violations = sum(one in admitted and self._was_due(one, other, leads) for one, other in pairs)
        shares, limits = step_shares(schedule, scheduler) if shares is None else shares, scheduler.limits
        weights = {each.name: each.weight for each in scheduler.classes}
        quantum = limits.quantum_steps * FULL_STEP
        for one, other in pairs:
            scale, other_scale = SCALE // weights[one], SCALE // weights[other]
            if leads.get(one, _UNKNOWN).lowest > quantum * scale:
                scale *= limits.weight_divisor
            if 2 * leads.get(other, _UNKNOWN).highest > quantum * other_scale:
                other_scale *= limits.weight_divisor
            other_service = max(shares[other]) * other_scale
            parts = zip(self.excess[one, other], shares[one], strict=True)
            self.excess[one, other] = [max(0, before + part * scale - other_service) for before, part in parts]
        return num_violations

    def _has_waiting(self, name: str) -> bool:
        queue = self._queue.queues[name]
        return len(queue) > 0 and name not in self._scheduler.closed_classes and queue.arrival_clock() is not None

    def _was_due(self, one: str, other: str, leads: Mapping[str, ClassLead]) -> bool:
        scheduler, limits = self._scheduler, self._scheduler.limits
        weights = {each.name: each.weight for each in scheduler.classes}
        first_steps = next(each.first_steps for each in scheduler.bounds if each.name == other)
        tolerance = first_steps * FULL_STEP * (SCALE // weights[one]) * limits.weight_divisor
        if max(self.excess[one, other]) <= tolerance:
            return False
        quantum = limits.quantum_steps * FULL_STEP * (SCALE // weights[other])
        may_exceed = 2 * leads.get(other, _UNKNOWN).highest > quantum
        part = weights[other] * (1 if may_exceed else limits.weight_divisor)
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
    started: list[weakref.ref[Request]]


class LimitMonitor:
    """Counts requests that run although their tenant is at its limit over all replicas. Thread-safe.

    It does not know how many slots each replica may use, only the limits and which requests run. It ignores the beams
    of a search, which run together, and after a change of a limit, the requests that started before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._max_tenants = MIN_TENANTS
        self._reloads: dict[int, int] = {}
        self._kept: dict[int, set[str]] = {}

    def join(self, replica: int, number: int = 0) -> None:
        with self._lock:
            self._reloads[replica] = number
            self._kept.pop(replica, None)

    def leave(self, replica: int) -> None:
        with self._lock:
            self._reloads.pop(replica, None)
            self._kept.pop(replica, None)

    def record_reload(self, replica: int, kept: Iterable[str], number: int) -> None:
        """Record that a replica uses the configuration of reload `number`. `kept`: ids of requests that got a slot of
        their tenant under an earlier limit and have not run yet. They never count as violations.
        """
        with self._lock:
            self._reloads[replica] = number
            self._kept[replica] = {*kept}
            self._tenants.clear()

    def record_started(self, requests: Iterable[Request], limits: SchedulerLimits) -> int:
        """Record requests that got running slots. Return how many of them exceed their tenant's limit."""
        num_over_limit = 0
        with self._lock:
            for request in requests:
                limit = limits.max_running_of_tenant.get(request.tenant, limits.max_running_per_tenant)
                is_kept = self._pop_kept(request.request_id)
                is_in_search = request.is_beam or request.root_request.beam_search is not None
                if limit is not None and not (is_kept or is_in_search):
                    num_over_limit += self._add(request, limit)
        return num_over_limit

    def record_migrated(self, request: Request, limits: SchedulerLimits) -> int:
        """Record a migrated request. Return 1 if its tenant exceeds a limit that all replicas already apply, else 0."""
        if len({*self._reloads.values()}) > 1:
            return 0
        return self.record_started([request], limits)

    def _pop_kept(self, request_id: str) -> bool:
        found = [kept for kept in self._kept.values() if request_id in kept]
        for kept in found:
            kept.discard(request_id)
        return bool(found)

    def _add(self, request: Request, limit: int) -> bool:
        tenant = self._tenants.get(request.tenant)
        running = [] if tenant is None or tenant.limit != limit else _running(tenant)
        self._tenants[request.tenant] = _Tenant(limit, [*running, weakref.ref(request)])
        if len(self._tenants) > self._max_tenants:
            self._tenants = {name: each for name, each in self._tenants.items() if _running(each)}
            self._max_tenants = 2 * len(self._tenants) + MIN_TENANTS
        return len(running) >= limit


def _running(tenant: _Tenant) -> list[weakref.ref[Request]]:
    return [each for each in tenant.started if (request := each()) is not None and not request.is_finished]
