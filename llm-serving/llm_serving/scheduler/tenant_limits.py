"""Tenants that may have only so many requests running: their further ones are kept apart, in nobody's way."""

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
    """What follows from an event for requests that have had no place."""

    held: list[Request]
    """They may wait for one no longer, and are kept apart."""
    released: list[Request]
    """They may wait for one from now on."""


class SlotDemand(NamedTuple):
    """What a tenant has here, and wants, of the places that its limit gives it at all schedulers together."""

    limit: int
    num_leased: int
    """Of these places, those that were dealt to this scheduler and have not been given back."""
    num_active: int
    """Places that are taken."""
    num_waiting: int
    """Requests that wait for one."""


class _Tenant:
    """One tenant with a limit and requests that have not ended."""

    def __init__(self, name: str, limit: int, classes: Sequence[RequestClass], limits: SchedulerLimits) -> None:
        self.name = name
        self.limit = limit
        self.num_leased = 0 if limits.num_schedulers > 1 else limit
        """Places that it may take here."""
        self.sharing = WeightedFairSharing(classes, replace(limits, max_num_seqs=max(1, limit), num_schedulers=1), 1)
        self.active: dict[int, Request] = {}
        """By sequence: those that have been admitted and not ended, wherever they are now."""
        self.released: dict[str, dict[int, Request]] = {}
        """By class and sequence: those that may wait for a place."""
        self.held: dict[str, list[tuple[_Key, Request]]] = {}
        """By class: heaps of those that may not."""

    @property
    def is_empty(self) -> bool:
        return not (self.active or any(self.released.values()) or any(self.held.values()))

    @property
    def num_free(self) -> int:
        return max(0, self.num_leased - len(self.active))

    @property
    def demand(self) -> SlotDemand:
        num_passed = sum(map(len, self.released.values()))
        return SlotDemand(self.limit, self.num_leased, len(self.active), num_passed + sum(map(len, self.held.values())))


class TenantLimiter:
    """Lets so many requests of a tenant wait for a place, in each class, as it may still run.

    So nobody of a tenant at its limit stands in a queue, where others would be behind it, and the best of those kept
    apart in each class come first when one of the tenant's ends. Whoever had a place once is not kept apart: it counts
    until it ends.

    A tenant's classes share what it may run as all classes share the server: a lower one whose next request has waited
    `ageing_steps` takes turns with the higher ones by weight. When it has its turn, the free places are kept for it,
    and it pays for them as for those it has.

    Where several schedulers serve, a limit is that of all together: a tenant may take the places that have been dealt
    to this one, and a place that a request leaves is given back.
    """

    def __init__(self, limits: SchedulerLimits, classes: Sequence[RequestClass], clocks: Mapping[str, int]) -> None:
        """Classes in ascending order of rank; `clocks` count the steps each could take part in."""
        self._limits = limits
        self._classes = tuple(classes)
        self._clocks = clocks
        self._tenants: dict[str, _Tenant] = {}
        self._full: dict[str, _Tenant] = {}
        """Those with somebody who is kept apart: few, where tenants are many."""
        self._names_of_full: tuple[str, ...] = ()
        self._uses_leases = limits.num_schedulers > 1
        self._changed_tenants: dict[str, None] = {}
        """Tenants whose needs are others since they were told, where several schedulers share the places."""

    def add(self, request: Request) -> LimiterChanges | None:
        """What becomes of the request, which has never had a place, and of others.

        None: nothing limits its tenant, or it has taken its place along from another scheduler.
        """
        tenant = self._tenant(request.tenant)
        if tenant is None or request.sequence in tenant.active:
            return None
        heapq.heappush(tenant.held.setdefault(request.request_class.name, []), (request.queue_key, request))
        return self._rebalance(tenant)

    def add_migrated(self, request: Request) -> LimiterChanges:
        """The request has had a place at another scheduler, and takes it along."""
        tenant = self._tenant(request.tenant)
        if tenant is None:
            return LimiterChanges([], [])
        if self._uses_leases:
            tenant.num_leased += 1
        return self.record_admission(request)

    def record_admission(self, request: Request) -> LimiterChanges:
        """The request has a place."""
        tenant = self._tenant(request.tenant)
        if tenant is None:
            return LimiterChanges([], [])
        tenant.active[request.sequence] = request
        if self._uses_leases:  # further beams of a search have places whatever was dealt
            tenant.num_leased = max(tenant.num_leased, len(tenant.active))
        tenant.released.get(request.request_class.name, {}).pop(request.sequence, None)
        return self._rebalance(tenant)

    def remove(self, request: Request) -> LimiterChanges:
        """The request has ended, or goes into another class."""
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
        """Tenants may take so many places more here, or less."""
        changes = LimiterChanges([], [])
        for name, number in more.items():
            tenant = self._tenant(name)
            if tenant is None:  # it has no limit any more
                continue
            tenant.num_leased = max(tenant.num_leased + number, len(tenant.active))
            for total, new in zip(changes, self._rebalance(tenant), strict=True):
                total += new
            if tenant.is_empty:
                del self._tenants[name]
        return changes

    def pop_demand(self) -> dict[str, SlotDemand]:
        """Of the tenants where these are others than before; nothing where no other scheduler shares the places."""
        if not self._changed_tenants:
            return {}
        changed, self._changed_tenants = self._changed_tenants, {}
        return {name: self._demand_of(name) for name in changed}

    @property
    def has_changed_demand(self) -> bool:
        """Whether `take_needs` has something to tell."""
        return bool(self._changed_tenants)

    def adopt(self, before: TenantLimiter) -> None:
        """Who had a place by another gate, which decided until now, has it by this one, and what was dealt is dealt."""
        for name, tenant in before._tenants.items():
            if (mine := self._tenant(name)) is not None:
                mine.active.update(tenant.active)
                mine.num_leased = tenant.num_leased if self._uses_leases else mine.num_leased
        if self._uses_leases:
            self._changed_tenants |= dict.fromkeys(before._tenants) | before._changed_tenants  # who has left, too

    def tick(self) -> LimiterChanges:
        """A step has been formed: tenants with requests that are kept apart pay for the places they have."""
        changes = LimiterChanges([], [])
        for tenant in list(self._full.values()):
            waiting, held = self._update_contenders(tenant)
            if (due := self._class_due(tenant)) is not None:
                held[due] += min(tenant.num_free, len(tenant.released.get(due, ())))
            tenant.sharing.charge(held, {}, dict.fromkeys(held, 0), waiting, ())
            for total, new in zip(changes, self._rebalance(tenant), strict=True):
                total += new
        return changes

    def holds_slot(self, request: Request) -> bool:
        """Whether it has one of the places of its tenant, had one, or has taken it along from another scheduler."""
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and request.sequence in tenant.active

    def is_held(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and any(
            each is request for _, each in tenant.held.get(request.request_class.name, [])
        )

    def held_requests(self) -> Iterator[Request]:
        """All that are kept apart."""
        for tenant in self._full.values():
            for heap in tenant.held.values():
                yield from (request for _, request in heap)

    def full_tenants(self) -> tuple[str, ...]:
        """The tenants that run as many requests as they may, and have more."""
        return self._names_of_full

    def _rebalance(self, tenant: _Tenant) -> LimiterChanges:
        """Keeps apart whoever may not wait for a place, and no other."""
        due = self._class_due(tenant) if any(tenant.held.values()) else None
        changes = LimiterChanges([], [])
        for name in {**tenant.released, **tenant.held}:
            passed, heap = tenant.released.setdefault(name, {}), tenant.held.setdefault(name, [])
            most = tenant.num_free if due in (None, name) else 0
            preemption_order = sorted(passed.values(), key=lambda each: each.queue_key, reverse=True)
            for each in preemption_order[: max(0, len(passed) - most)]:
                del passed[each.sequence]
                heapq.heappush(heap, (each.queue_key, each))
                changes.held.append(each)
            while heap and len(passed) < most:
                _, each = heapq.heappop(heap)
                passed[each.sequence] = each
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
        self._names_of_full = tuple(sorted(self._full))

    def _class_due(self, tenant: _Tenant) -> str | None:
        """The lower class whose turn it is; None: the higher ones go first as they do anyway."""
        waiting, held = self._update_contenders(tenant)
        name = tenant.sharing.next_class(waiting, held, dict.fromkeys(held, 0))
        return None if not waiting or name == waiting[0] else name

    def _update_contenders(self, tenant: _Tenant) -> tuple[list[str], dict[str, int]]:
        """Its classes with somebody who waits, by rank, and how many places each has."""
        counts = Counter(each.request_class.name for each in tenant.active.values())
        waiting, aged = [], []
        for each in self._classes:
            firsts = [request for _, request in tenant.held.get(each.name, [])[:1]]
            firsts += tenant.released.get(each.name, {}).values()
            if firsts:
                waiting.append(each.name)
                if self._clocks[each.name] - min(first.arrival_clock for first in firsts) >= each.ageing_steps:
                    aged.append(each.name)
        held = {each.name: counts[each.name] for each in self._classes}
        tenant.sharing.update_contenders(waiting, aged, held)
        return waiting, held

    def _tenant(self, name: str) -> _Tenant | None:
        found = self._tenants.get(name)
        if found is None and (limit := self._limit_of(name)) is not None:
            found = self._tenants[name] = _Tenant(name, limit, self._classes, self._limits)
        return found

    def _limit_of(self, name: str) -> int | None:
        return self._limits.max_running_of_tenant.get(name, self._limits.max_running_per_tenant)
