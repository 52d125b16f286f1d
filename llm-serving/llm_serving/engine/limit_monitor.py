"""Watches, while the server runs, that no tenant runs more requests at all replicas together than it may."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.scheduler.limits import SchedulerLimits

MIN_TENANTS: Final = 64
"""That are not worth looking through for those who have nobody left."""


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
                if limit is not None and not (is_kept or request.is_beam or request.asked.form is not None):
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
