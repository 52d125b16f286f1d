"""Watches, while the server runs, that no tenant runs more requests at all replicas together than it may."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from llm_serving.core.request import Request
from llm_serving.scheduler.limits import SchedulerLimits


class LimitMonitor:
    """One for all replicas of a master; each engine's thread tells whom a step gives a place for the first time.

    It knows nothing of how places are dealt out, only the limit, who has begun and who has ended. Beams of a search
    all run, so searches do not count. Where a limit is another one than before, whoever has a place keeps it, and those
    that begin from then on count.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[str, int] = {}
        self._begun: dict[str, list[Request]] = {}
        """By tenant."""

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
        if self._limits.get(request.tenant) != limit:
            self._limits[request.tenant] = limit
            self._begun[request.tenant] = []
        running = [each for each in self._begun[request.tenant] if not each.is_finished]
        self._begun[request.tenant] = [*running, request]
        return len(running) >= limit
