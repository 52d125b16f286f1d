"""Tenants that may have only so many requests running: their further ones are kept apart, in nobody's way."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.fair_sharing import Turns
from llm_serving.scheduler.limits import SchedulerLimits

_Key = tuple[float, ...]


class Changes(NamedTuple):
    """What follows from an event for requests that have had no place."""

    back: list[Request]
    """They may wait for one no longer, and are kept apart."""
    freed: list[Request]
    """They may wait for one from now on."""


class Need(NamedTuple):
    """What a tenant has here, and wants, of the places that its limit gives it at all schedulers together."""

    limit: int
    part: int
    """Of these places, those that were dealt to this scheduler and have not been given back."""
    num_active: int
    """Places that are taken."""
    num_wanted: int
    """Requests that wait for one."""


class _Tenant:
    """One tenant with a limit and requests that have not ended."""

    def __init__(self, name: str, limit: int, classes: Sequence[RequestClass], limits: SchedulerLimits) -> None:
        self.name = name
        self.limit = limit
        self.part = 0 if limits.num_schedulers > 1 else limit
        """Places that it may take here."""
        self.turns = Turns(classes, replace(limits, max_num_seqs=max(1, limit), num_schedulers=1), 1)
        self.active: dict[int, Request] = {}
        """By sequence: those that have been admitted and not ended, wherever they are now."""
        self.passed: dict[str, dict[int, Request]] = {}
        """By class and sequence: those that may wait for a place."""
        self.held: dict[str, list[tuple[_Key, Request]]] = {}
        """By class: heaps of those that may not."""

    @property
    def is_empty(self) -> bool:
        return not (self.active or any(self.passed.values()) or any(self.held.values()))

    @property
    def num_free(self) -> int:
        return max(0, self.part - len(self.active))

    @property
    def need(self) -> Need:
        num_passed = sum(map(len, self.passed.values()))
        return Need(self.limit, self.part, len(self.active), num_passed + sum(map(len, self.held.values())))


class TenantGate:
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
        self._is_dealt = limits.num_schedulers > 1
        self._changed: dict[str, None] = {}
        """Tenants whose needs are others since they were told, where several schedulers share the places."""

    def arrived(self, request: Request) -> Changes | None:
        """What becomes of the request, which has never had a place, and of others.

        None: nothing limits its tenant, or it has taken its place along from another scheduler.
        """
        tenant = self._tenant(request.tenant)
        if tenant is None or request.sequence in tenant.active:
            return None
        heapq.heappush(tenant.held.setdefault(request.request_class.name, []), (request.queue_key, request))
        return self._settle(tenant)

    def brought(self, request: Request) -> Changes:
        """The request has had a place at another scheduler, and takes it along."""
        tenant = self._tenant(request.tenant)
        if tenant is None:
            return Changes([], [])
        if self._is_dealt:
            tenant.part += 1
        return self.admitted(request)

    def admitted(self, request: Request) -> Changes:
        """The request has a place."""
        tenant = self._tenant(request.tenant)
        if tenant is None:
            return Changes([], [])
        tenant.active[request.sequence] = request
        if self._is_dealt:  # further beams of a search have places whatever was dealt
            tenant.part = max(tenant.part, len(tenant.active))
        tenant.passed.get(request.request_class.name, {}).pop(request.sequence, None)
        return self._settle(tenant)

    def left(self, request: Request) -> Changes:
        """The request has ended, or goes into another class."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            return Changes([], [])
        if tenant.active.pop(request.sequence, None) is not None and self._is_dealt:
            tenant.part -= 1
        name = request.request_class.name
        tenant.passed.get(name, {}).pop(request.sequence, None)
        held = tenant.held.get(name, [])
        if any(each is request for _, each in held):
            held[:] = [entry for entry in held if entry[1] is not request]
            heapq.heapify(held)
        changes = self._settle(tenant)
        if tenant.is_empty:
            del self._tenants[request.tenant]
        return changes

    def deal(self, more: Mapping[str, int]) -> Changes:
        """Tenants may take so many places more here, or less."""
        changes = Changes([], [])
        for name, number in more.items():
            tenant = self._tenant(name)
            if tenant is None:  # it has no limit any more
                continue
            tenant.part = max(tenant.part + number, len(tenant.active))
            for total, new in zip(changes, self._settle(tenant), strict=True):
                total += new
            if tenant.is_empty:
                del self._tenants[name]
        return changes

    def take_needs(self) -> dict[str, Need]:
        """Of the tenants where these are others than before; nothing where no other scheduler shares the places."""
        if not self._changed:
            return {}
        changed, self._changed = self._changed, {}
        return {name: self._need_of(name) for name in changed}

    @property
    def has_news(self) -> bool:
        """Whether `take_needs` has something to tell."""
        return bool(self._changed)

    def take_over(self, before: TenantGate) -> None:
        """Who had a place by another gate, which decided until now, has it by this one, and what was dealt is dealt."""
        for name, tenant in before._tenants.items():
            if (mine := self._tenant(name)) is not None:
                mine.active.update(tenant.active)
                mine.part = tenant.part if self._is_dealt else mine.part
        if self._is_dealt:
            self._changed |= dict.fromkeys(before._tenants) | before._changed  # who has left, too

    def tick(self) -> Changes:
        """A step has been formed: tenants with requests that are kept apart pay for the places they have."""
        changes = Changes([], [])
        for tenant in list(self._full.values()):
            waiting, held = self._look(tenant)
            if (due := self._due(tenant)) is not None:
                held[due] += min(tenant.num_free, len(tenant.passed.get(due, ())))
            tenant.turns.charge(held, {}, dict.fromkeys(held, 0), waiting, ())
            for total, new in zip(changes, self._settle(tenant), strict=True):
                total += new
        return changes

    def counts(self, request: Request) -> bool:
        """Whether it has one of the places of its tenant, had one, or has taken it along from another scheduler."""
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and request.sequence in tenant.active

    def holds(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and any(
            each is request for _, each in tenant.held.get(request.request_class.name, [])
        )

    def held(self) -> Iterator[Request]:
        """All that are kept apart."""
        for tenant in self._full.values():
            for heap in tenant.held.values():
                yield from (request for _, request in heap)

    def full(self) -> tuple[str, ...]:
        """The tenants that run as many requests as they may, and have more."""
        return self._names_of_full

    def _settle(self, tenant: _Tenant) -> Changes:
        """Keeps apart whoever may not wait for a place, and no other."""
        due = self._due(tenant) if any(tenant.held.values()) else None
        changes = Changes([], [])
        for name in {**tenant.passed, **tenant.held}:
            passed, heap = tenant.passed.setdefault(name, {}), tenant.held.setdefault(name, [])
            most = tenant.num_free if due in (None, name) else 0
            worst_first = sorted(passed.values(), key=lambda each: each.queue_key, reverse=True)
            for each in worst_first[: max(0, len(passed) - most)]:
                del passed[each.sequence]
                heapq.heappush(heap, (each.queue_key, each))
                changes.back.append(each)
            while heap and len(passed) < most:
                _, each = heapq.heappop(heap)
                passed[each.sequence] = each
                changes.freed.append(each)
        self._note_whether_full(tenant)
        if self._is_dealt:
            self._changed[tenant.name] = None
        return changes

    def _need_of(self, name: str) -> Need:
        tenant = self._tenants.get(name)
        return Need(self._limit_of(name) or 0, 0, 0, 0) if tenant is None else tenant.need

    def _note_whether_full(self, tenant: _Tenant) -> None:
        if any(tenant.held.values()) == (tenant.name in self._full):
            return
        if tenant.name in self._full:
            del self._full[tenant.name]
        else:
            self._full[tenant.name] = tenant
        self._names_of_full = tuple(sorted(self._full))

    def _due(self, tenant: _Tenant) -> str | None:
        """The lower class whose turn it is; None: the higher ones go first as they do anyway."""
        waiting, held = self._look(tenant)
        name = tenant.turns.next(waiting, held, dict.fromkeys(held, 0))
        return None if not waiting or name == waiting[0] else name

    def _look(self, tenant: _Tenant) -> tuple[list[str], dict[str, int]]:
        """Its classes with somebody who waits, by rank, and how many places each has."""
        counts = Counter(each.request_class.name for each in tenant.active.values())
        waiting, aged = [], []
        for each in self._classes:
            firsts = [request for _, request in tenant.held.get(each.name, [])[:1]]
            firsts += tenant.passed.get(each.name, {}).values()
            if firsts:
                waiting.append(each.name)
                if self._clocks[each.name] - min(first.arrival_clock for first in firsts) >= each.ageing_steps:
                    aged.append(each.name)
        held = {each.name: counts[each.name] for each in self._classes}
        tenant.turns.look(waiting, aged, held)
        return waiting, held

    def _tenant(self, name: str) -> _Tenant | None:
        found = self._tenants.get(name)
        if found is None and (limit := self._limit_of(name)) is not None:
            found = self._tenants[name] = _Tenant(name, limit, self._classes, self._limits)
        return found

    def _limit_of(self, name: str) -> int | None:
        return self._limits.max_running_of_tenant.get(name, self._limits.max_running_per_tenant)
