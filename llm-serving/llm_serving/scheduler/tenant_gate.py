"""Tenants that may have only so many requests running: their further ones are kept apart, in nobody's way."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from llm_serving.core.request import Request
from llm_serving.scheduler.limits import SchedulerLimits

_Key = tuple[float, ...]


class _Tenant:
    """One tenant with a limit and requests that have not ended."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active: set[int] = set()
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
        return max(0, self.limit - len(self.active))


class TenantGate:
    """Lets so many requests of a tenant wait for a place, in each class, as it may still run.

    So nobody of a tenant at its limit stands in a queue, where others would be behind it, and the best of those kept
    apart in each class come first when one of the tenant's ends. Whoever had a place once is not kept apart: it counts
    until it ends.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}

    def passes(self, request: Request) -> bool:
        """Whether the request, which has never had a place, may wait for one now; it is kept apart otherwise."""
        tenant = self._tenant(request)
        if tenant is None:
            return True
        name = request.request_class.name
        passed = tenant.passed.setdefault(name, {})
        if len(passed) < tenant.num_free:
            passed[request.sequence] = request
            return True
        heapq.heappush(tenant.held.setdefault(name, []), (request.queue_key, request))
        return False

    def admitted(self, request: Request) -> list[Request]:
        """The request has a place; returns those that may wait for one no longer: they are kept apart."""
        tenant = self._tenant(request)
        if tenant is None:
            return []
        tenant.active.add(request.sequence)
        tenant.passed.get(request.request_class.name, {}).pop(request.sequence, None)
        back = []
        for name, passed in tenant.passed.items():
            worst_first = sorted(passed.values(), key=lambda each: each.queue_key, reverse=True)
            for each in worst_first[: max(0, len(passed) - tenant.num_free)]:
                del passed[each.sequence]
                heapq.heappush(tenant.held.setdefault(name, []), (each.queue_key, each))
                back.append(each)
        return back

    def left(self, request: Request) -> list[Request]:
        """The request has ended, or goes into another class; returns those that may wait for a place from now on."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            return []
        tenant.active.discard(request.sequence)
        name = request.request_class.name
        tenant.passed.get(name, {}).pop(request.sequence, None)
        held = tenant.held.get(name, [])
        if any(each is request for _, each in held):
            held[:] = [entry for entry in held if entry[1] is not request]
            heapq.heapify(held)
        freed = []
        for name, heap in tenant.held.items():
            passed = tenant.passed.setdefault(name, {})
            while heap and len(passed) < tenant.num_free:
                _, each = heapq.heappop(heap)
                passed[each.sequence] = each
                freed.append(each)
        if tenant.is_empty:
            del self._tenants[request.tenant]
        return freed

    def holds(self, request: Request) -> bool:
        tenant = self._tenants.get(request.tenant)
        return tenant is not None and any(
            each is request for _, each in tenant.held.get(request.request_class.name, [])
        )

    def held(self) -> Iterator[Request]:
        """All that are kept apart."""
        for tenant in self._tenants.values():
            for heap in tenant.held.values():
                yield from (request for _, request in heap)

    def full(self) -> tuple[str, ...]:
        """The tenants that run as many requests as they may, and have more."""
        return tuple(sorted(name for name, tenant in self._tenants.items() if any(tenant.held.values())))

    def _tenant(self, request: Request) -> _Tenant | None:
        found = self._tenants.get(request.tenant)
        if found is None:
            limit = self._limits.max_running_of_tenant.get(request.tenant, self._limits.max_running_per_tenant)
            if limit is not None:
                found = self._tenants[request.tenant] = _Tenant(limit)
        return found
