"""Per-tenant concurrency limits: a tenant's requests above its limit are held outside the waiting queue."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.fair_sharing import WeightedFairSharing
from llm_serving.scheduler.limits import SchedulerLimits

_Key = tuple[float, ...]


class LimiterChanges(NamedTuple):
    """Changes of the waiting queue: requests in `held` leave it, requests in `released` enter it."""

    held: list[Request]
    released: list[Request]

    def add(self, more: LimiterChanges) -> None:
        self.held.extend(more.held)
        self.released.extend(more.released)


class SlotDemand(NamedTuple):
    """Used and requested slots of a tenant at one scheduler. All schedulers together may give the tenant `limit` slots.
    This scheduler may give it `num_leased` of them.
    """

    limit: int
    num_leased: int
    num_active: int
    num_waiting: int


class _Tenant:
    def __init__(self, name: str, limit: int, classes: Sequence[RequestClass], limits: SchedulerLimits) -> None:
        self.name = name
        self.limit = limit
        self.num_leased = 0 if limits.num_schedulers > 1 else limit
        self.sharing = WeightedFairSharing(classes, replace(limits, max_num_seqs=max(1, limit), num_schedulers=1), 1)
        self.active: dict[int, Request] = {}
        self.released: dict[str, dict[int, Request]] = {}
        self.held: dict[str, list[tuple[_Key, Request]]] = {}
        """Class -> heap of requests outside the waiting queue."""

    @property
    def is_empty(self) -> bool:
        return not (self.active or any(self.released.values()) or any(self.held.values()))

    @property
    def num_free(self) -> int:
        return max(0, self.num_leased - len(self.active))

    @property
    def demand(self) -> SlotDemand:
        num_released = sum(map(len, self.released.values()))
        num_waiting = num_released + sum(map(len, self.held.values()))
        return SlotDemand(self.limit, self.num_leased, len(self.active), num_waiting)


class TenantLimiter:
    """Limits a tenant's requests in the waiting queue of each class to the number of the tenant's free slots.

    A tenant at its limit therefore blocks no other request. When one of its requests finishes, the first held request
    of each class enters the queue. An admitted request uses a slot of its tenant until it finishes, also while it is
    preempted. The classes of a tenant share its limit by weight. If fair sharing gives the next slot to a lower class,
    because its requests have waited long enough, the free slots are reserved for this class. Several schedulers share a
    limit by leases: each uses only its leased slots, and returns a lease when a request finishes.
    """

    def __init__(self, limits: SchedulerLimits, classes: Sequence[RequestClass], clocks: Mapping[str, int]) -> None:
        self._limits = limits
        self._classes = tuple(classes)
        self._clocks = clocks
        self._tenants: dict[str, _Tenant] = {}
        self._full: dict[str, _Tenant] = {}
        self.full_tenants: tuple[str, ...] = ()
        self.is_active = limits.max_running_per_tenant is not None or bool(limits.max_running_of_tenant)
        self._uses_leases = limits.num_schedulers > 1
        self._changed_tenants: dict[str, None] = {}
        """Ordered set of the tenants whose demand changed since `pop_demand`; empty without leases."""

    def add(self, request: Request) -> LimiterChanges | None:
        """Add a request, and hold it if its tenant is at its limit. Return changes of the waiting queue, or None if the
        tenant has no limit, or if the request has a slot already because it has run before.
        """
        tenant = self._tenant(request.tenant)
        if tenant is None or request.sequence in tenant.active:
            return None
        heapq.heappush(tenant.held.setdefault(request.request_class.name, []), (request.queue_key, request))
        return self._rebalance(tenant)

    def add_migrated(self, request: Request) -> LimiterChanges:
        tenant = self._tenant(request.tenant)
        if tenant is None:
            return LimiterChanges([], [])
        if self._uses_leases:
            tenant.num_leased += 1
        return self.record_admission(request)

    def record_admission(self, request: Request) -> LimiterChanges:
        tenant = self._tenant(request.tenant)
        if tenant is None:
            return LimiterChanges([], [])
        tenant.active[request.sequence] = request
        if self._uses_leases:  # beams of a search get slots beyond the leases
            tenant.num_leased = max(tenant.num_leased, len(tenant.active))
        tenant.released.get(request.request_class.name, {}).pop(request.sequence, None)
        return self._rebalance(tenant)

    def remove(self, request: Request) -> LimiterChanges:
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            return LimiterChanges([], [])
        if tenant.active.pop(request.sequence, None) is not None and self._uses_leases:
            tenant.num_leased -= 1
        name = request.request_class.name
        tenant.released.get(name, {}).pop(request.sequence, None)
        held = tenant.held.get(name, [])
        if any(each is request for _, each in held):
            held[:] = [entry for entry in held if entry[1] is not request]
            heapq.heapify(held)
        changes = self._rebalance(tenant)
        if tenant.is_empty:
            del self._tenants[request.tenant]
        return changes

    def adjust_leases(self, more: Mapping[str, int]) -> LimiterChanges:
        """Add leased slots: tenant -> number. A negative number removes slots that are not in use."""
        changes = LimiterChanges([], [])
        for name, number in more.items():
            tenant = self._tenant(name)
            if tenant is None:  # a reload removed its limit
                continue
            tenant.num_leased = max(tenant.num_leased + number, len(tenant.active))
            changes.add(self._rebalance(tenant))
            if tenant.is_empty:
                del self._tenants[name]
        return changes

    def pop_demand(self) -> dict[str, SlotDemand]:
        if not self._changed_tenants:
            return {}
        changed, self._changed_tenants = self._changed_tenants, {}
        return {name: self._demand_of(name) for name in changed}

    @property
    def has_changed_demand(self) -> bool:
        return bool(self._changed_tenants)

    def adopt(self, before: TenantLimiter) -> None:
        for name, tenant in before._tenants.items():
            if (mine := self._tenant(name)) is not None:
                mine.active.update(tenant.active)
                mine.num_leased = tenant.num_leased if self._uses_leases else mine.num_leased
        if self._uses_leases:
            # Also tenants without requests report their demand, so that their leases return.
            self._changed_tenants |= dict.fromkeys(before._tenants) | before._changed_tenants
            self.is_active = self.is_active or bool(self._changed_tenants)

    def tick(self) -> LimiterChanges:
        """Once a step, charge each class for its admitted requests of tenants at their limit. Return queue changes."""
        changes = LimiterChanges([], [])
        for tenant in list(self._full.values()):
            waiting, slots = self._update_contenders(tenant)
            if (due := self._class_due(tenant)) is not None:
                slots[due] += min(tenant.num_free, len(tenant.released.get(due, ())))
            tenant.sharing.charge(slots, {}, dict.fromkeys(slots, 0), waiting, ())
            changes.add(self._rebalance(tenant))
        return changes

    def holds_slot(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and request.sequence in tenant.active

    def is_held(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and any(
            each is request for _, each in tenant.held.get(request.request_class.name, [])
        )

    def held_requests(self) -> Iterator[Request]:
        for tenant in self._full.values():
            for heap in tenant.held.values():
                yield from (request for _, request in heap)

    def _rebalance(self, tenant: _Tenant) -> LimiterChanges:
        """Hold or release requests: each class may have as many in its queue as the tenant has free slots."""
        due = self._class_due(tenant) if any(tenant.held.values()) else None
        changes = LimiterChanges([], [])
        for name in {**tenant.released, **tenant.held}:
            released, heap = tenant.released.setdefault(name, {}), tenant.held.setdefault(name, [])
            most = tenant.num_free if due in (None, name) else 0
            worst_first = sorted(released.values(), key=lambda each: each.queue_key, reverse=True)
            for each in worst_first[: max(0, len(released) - most)]:
                del released[each.sequence]
                heapq.heappush(heap, (each.queue_key, each))
                changes.held.append(each)
            while heap and len(released) < most:
                _, each = heapq.heappop(heap)
                released[each.sequence] = each
                changes.released.append(each)
        self._update_full(tenant)
        if self._uses_leases:
            self._changed_tenants[tenant.name] = None
        return changes

    def _demand_of(self, name: str) -> SlotDemand:
        tenant = self._tenants.get(name)
        return SlotDemand(self._limit_of(name) or 0, 0, 0, 0) if tenant is None else tenant.demand

    def _update_full(self, tenant: _Tenant) -> None:
        if any(tenant.held.values()) == (tenant.name in self._full):
            return
        if tenant.name in self._full:
            del self._full[tenant.name]
        else:
            self._full[tenant.name] = tenant
        self.full_tenants = tuple(sorted(self._full))

    def _class_due(self, tenant: _Tenant) -> str | None:
        waiting, slots = self._update_contenders(tenant)
        name = tenant.sharing.next_class(waiting, slots, dict.fromkeys(slots, 0))
        return None if not waiting or name == waiting[0] else name

    def _update_contenders(self, tenant: _Tenant) -> tuple[list[str], dict[str, int]]:
        """Determine which classes of the tenant may admit requests. Return its classes with waiting requests, by
        ascending rank, and the number of admitted requests of each class.
        """
        counts = Counter(each.request_class.name for each in tenant.active.values())
        waiting, aged = [], []
        for each in self._classes:
            firsts = [request for _, request in tenant.held.get(each.name, [])[:1]]
            firsts += tenant.released.get(each.name, {}).values()
            if firsts:
                waiting.append(each.name)
                if self._clocks[each.name] - min(first.arrival_clock for first in firsts) >= each.ageing_steps:
                    aged.append(each.name)
        slots = {each.name: counts[each.name] for each in self._classes}
        tenant.sharing.update_contenders(waiting, aged, slots)
        return waiting, slots

    def _tenant(self, name: str) -> _Tenant | None:
        found = self._tenants.get(name)
        if found is None and (limit := self._limit_of(name)) is not None:
            found = self._tenants[name] = _Tenant(name, limit, self._classes, self._limits)
        return found

    def _limit_of(self, name: str) -> int | None:
        return self._limits.max_running_of_tenant.get(name, self._limits.max_running_per_tenant)
