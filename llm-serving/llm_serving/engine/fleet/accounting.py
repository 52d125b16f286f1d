"""Accounting across replicas, because limits of tenants and weights of classes apply to all replicas together.

Service is counted in virtual tokens: an output token counts as two prompt tokens. Between two steps, each engine
reports its service and charges other replicas' service in its scheduler. Recordings contain these calls for a replay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from llm_serving.core.request import Request
from llm_serving.engine.fleet.monitors import LimitMonitor, step_shares, weighted_service
from llm_serving.engine.fleet.sharing import FleetClassUsage, TenantSlots
from llm_serving.engine.observers import FairnessObserver
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.fair_sharing import MAX_TENANTS
from llm_serving.scheduler.schedule import Blocked

Service = Mapping[tuple[str, str], int]
"""(class, tenant) -> virtual tokens."""


class TenantUsage:
    """The virtual tokens that all replicas have served, by class and tenant. Thread-safe. Each list of counts has one
    element per (class, tenant), in order of first service. A list that belongs to one replica may be shorter: it lacks
    pairs that were first served after its last update.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indices: dict[tuple[str, str], int] = {}
        self._totals: list[int] = []
        self._version = 0
        self._snapshot_versions: dict[int, int] = {}
        self._snapshots: dict[int, list[int]] = {}
        self._known: dict[int, list[int]] = {}
        """Replica -> the part of the totals that `pop_remote` does not report to this replica: the totals when the
        replica joined, its own service since then, and what `pop_remote` has already reported.
        """

    def join(self, replica: int) -> None:
        """Add a replica. `pop_remote` reports to it only what other replicas serve after this call."""
        with self._lock:
            self._snapshots[replica], self._known[replica] = self._totals.copy(), self._totals.copy()
            self._snapshot_versions[replica] = self._version

    def leave(self, replica: int) -> None:
        with self._lock:
            for by_replica in (self._snapshot_versions, self._snapshots, self._known):
                by_replica.pop(replica, None)

    def add(self, replica: int, service: Service) -> None:
        if not service:
            return
        with self._lock:
            if len(self._snapshots) < 2:
                return
            if len(self._totals) > MAX_TENANTS:
                self._clear()
            indices, totals = self._indices, self._totals
            own = [self._snapshots[replica], self._known[replica]] if replica in self._snapshots else []
            for key, num_tokens in service.items():
                if (index := indices.get(key)) is None:
                    index = indices[key] = len(totals)
                    totals.append(0)
                totals[index] += num_tokens
                for each in own:
                    if index >= len(each):
                        each += [0] * (index + 1 - len(each))
                    each[index] += num_tokens
            self._version += 1

    def take_snapshot(self, replica: int) -> None:
        if self._snapshot_versions.get(replica) in (None, self._version):  # without the lock: most calls end here
            return
        with self._lock:
            self._snapshots[replica], self._snapshot_versions[replica] = self._totals.copy(), self._version

    def pop_remote(self, replica: int) -> Service:
        """Return what other replicas served before the latest `take_snapshot`, except what earlier calls returned."""
        with self._lock:
            snapshot, known = self._snapshots.get(replica), self._known.get(replica)
            if snapshot is None or known is None or snapshot == known:
                return {}
            known += [0] * (len(snapshot) - len(known))
            self._known[replica] = snapshot.copy()
            rows = zip(self._indices, snapshot, known, strict=False)
            return {key: total - before for key, total, before in rows if total != before}

    def _clear(self) -> None:
        """Drop all counts, because there are too many. Service that `pop_remote` has not returned yet is lost."""
        self._indices.clear()
        self._totals.clear()
        for each in (*self._snapshots.values(), *self._known.values()):
            each.clear()


class FleetAccounting:
    """Usage by tenants and classes, and the running slots of tenants, on all replicas of a master. Thread-safe.

    Before each step, a replica reads the service of other replicas. So the token counts of two tenants with waiting
    requests can differ by more than on a single replica, but only by the tokens that other replicas compute in two
    steps.
    """

    def __init__(self) -> None:
        self.tenant_usage = TenantUsage()
        self.tenant_slots = TenantSlots()
        self.class_usage = FleetClassUsage()
        self.limit_monitor = LimitMonitor()

    def join(self, replica: int, wake: Callable[[], None] = lambda: None, num_reloads: int = 0) -> None:
        """Add a replica after `num_reloads` reloads. Any thread may call `wake`, which makes it apply its new slots."""
        self.tenant_slots.join(replica, wake)
        self.limit_monitor.join(replica, num_reloads)
        self.class_usage.leave(replica)
        self.tenant_usage.join(replica)

    def leave(self, replica: int) -> None:
        for part in (self.tenant_slots, self.limit_monitor, self.class_usage, self.tenant_usage):
            part.leave(replica)


class FleetSync(FairnessObserver):
    """Connects one scheduler with the accounting of all replicas. Only the engine's thread may call it."""

    def __init__(self, index: int, scheduler: Scheduler, metrics: Metrics) -> None:
        super().__init__(index, scheduler, metrics)
        self._accounting = FleetAccounting()
        self._num_reloads = 0

    def join(self, accounting: FleetAccounting, wake: Callable[[], None]) -> None:
        accounting.join(self._index, wake, self._num_reloads)
        self._accounting, self._limits = accounting, accounting.limit_monitor

    def synchronize(self) -> None:
        """Pass to the scheduler, before it forms a step, what other replicas have changed: the service of tenants, the
        number of slots of each tenant here, and the classes to deprioritize.
        """
        scheduler, accounting = self._scheduler, self._accounting
        accounting.tenant_usage.take_snapshot(self._index)
        if scheduler.num_waiting:
            self.apply_remote_service()
        if leases := accounting.tenant_slots.exchange(self._index, scheduler.pop_tenant_demand()):
            scheduler.adjust_tenant_leases(leases)
        if (exceeding := accounting.class_usage.pop_exceeding(self._index)) is not None:
            scheduler.deprioritize(exceeding)

    def apply_remote_service(self) -> None:
        """Charge each tenant for the tokens that other replicas served to it. Only admissions depend on charges."""
        if service := self._accounting.tenant_usage.pop_remote(self._index):
            self._scheduler.charge_remote_service(service)

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        self.report(schedule)
        super().on_scheduled(schedule, in_flight, blocked, now)

    def report(self, schedule: Schedule | None = None) -> None:
        """Report new service to other replicas. `schedule` is the new step. It is None if no step was formed, or if the
        simulator computes the step without a `Schedule`.
        """
        scheduler, accounting = self._scheduler, self._accounting
        self._leads, self._shares = {}, None
        accounting.tenant_usage.add(self._index, scheduler.pop_service())
        if (usage := scheduler.pop_class_usage()) is not None:
            if schedule is None:
                service = {name: each.service for name, each in usage.items()}
            else:
                self._shares = step_shares(schedule, scheduler)
                service = weighted_service(self._shares, scheduler)
            self._leads = accounting.class_usage.charge(self._index, usage, service)

    def record_reload(self, number: int) -> None:
        self._num_reloads = number
        kept = [*self._scheduler.unstarted_slot_holders(), *self._accounting.tenant_slots.migrating]
        self._limits.record_reload(self._index, kept, number)

    def record_migrated(self, request: Request) -> None:
        """Record that this replica continues a migrated request. The request still counts in its tenant's limit."""
        self._accounting.tenant_slots.finish_migration(self._index, request.request_id)
        self._metrics.shares_broken(self._limits.record_migrated(request, self._scheduler.limits), 0)
