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
    all run, so searches do not count. Where a limit is another one than before, whoever has a place keeps it, and those
    that begin from then on count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._most_tenants = MIN_TENANTS

    def begun(self, requests: Iterable[Request], limits: SchedulerLimits) -> int:
        """These have places now, as before at another replica or for the first time; returns how many should not."""
        num_beyond = 0
        for request in requests:
            limit = limits.max_running_of_tenant.get(request.tenant, limits.max_running_per_tenant)
            if limit is None or request.is_beam or request.asked.form is not None:
                continue
            with self._lock:
                num_beyond += self._add(request, limit)
        return num_beyond

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
