"""What all replicas share: the weights of request classes, and the running slots of each tenant."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Final, NamedTuple

from llm_serving.scheduler.fair_sharing import ClassUsage
from llm_serving.scheduler.tenant_limits import SlotDemand

_NO_CLASSES: Final[frozenset[str]] = frozenset()

MAX_LEAD_QUANTA: Final = 4
"""Maximum lead (see `FleetClassUsage`) in scheduling quanta. It limits how long a class is deprioritized."""
_NO_CHANGES: Final[Mapping[str, int]] = {}


class ClassDemand:
    """Counts, for each class, the replicas on which it has unmet demand. No step has to scan all replicas."""

    def __init__(self) -> None:
        self._classes: dict[int, frozenset[str]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def classes(self) -> Collection[str]:
        return self._counts.keys()

    def update(self, replica: int, usage: Mapping[str, ClassUsage]) -> None:
        names = frozenset([name for name, each in usage.items() if each.has_demand])
        before = self._classes.get(replica, _NO_CLASSES)
        self._classes[replica] = names
        if names != before:
            self._count(names - before, 1)
            self._count(before - names, -1)

    def leave(self, replica: int) -> None:
        self._count(self._classes.pop(replica, _NO_CLASSES), -1)

    def _count(self, names: Collection[str], change: int) -> None:
        for name in names:
            self._counts[name] += change
            if not self._counts[name]:
                del self._counts[name]


class ClassLead(NamedTuple):
    lowest: float
    highest: float


class FleetClassUsage:
    """Determines which classes exceed their share across all replicas. Thread-safe.

    The usage of a class is the share of steps that it received, divided by its weight. Its lead is its usage minus the
    lowest usage of all classes with demand. `ClassUsage.quantum` is the usage that a class gains by filling
    `quantum_steps` steps alone. A class is deprioritized when its lead exceeds its quantum, until its lead is at most
    half its quantum.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leads: Counter[str] = Counter()
        self._demand = ClassDemand()
        self._monitor = ClassLeadMonitor()
        self._exceeding = _NO_CLASSES
        self._reported: dict[int, frozenset[str]] = {}

    def leave(self, replica: int) -> None:
        with self._lock:
            self._demand.leave(replica)
            self._monitor.leave(replica)
            self._reported.pop(replica, None)

    def charge(
        self, replica: int, usage: Mapping[str, ClassUsage], service: Mapping[str, int]
    ) -> Mapping[str, ClassLead]:
        """Record the usage that each class gained by a step, from two sources: the scheduler (`usage`) and the rows of
        the step (`service`). Return the result of `ClassLeadMonitor.record`.
        """
        with self._lock:
            self._demand.update(replica, usage)
            _add_service(self._leads, {name: each.service for name, each in usage.items()}, usage, self._demand)
            exceeding = set()
            for name, each in usage.items():
                lead = self._leads[name]
                if lead > each.quantum or (name in self._exceeding and 2 * lead > each.quantum):
                    exceeding.add(name)
            self._exceeding = frozenset(exceeding)
            return self._monitor.record(replica, service, usage, self._demand)

    def pop_exceeding(self, replica: int) -> frozenset[str] | None:
        """Return the classes that exceed their share, or None if they are unchanged since the replica's last call."""
        if self._reported.get(replica, _NO_CLASSES) == self._exceeding:
            return None
        with self._lock:
            self._reported[replica] = self._exceeding
            return self._exceeding


class ClassLeadMonitor:
    """Recomputes the lead of each class (`FleetClassUsage`) from the contents of steps. Not thread-safe."""

    def __init__(self) -> None:
        self._leads: Counter[str] = Counter()
        self._lowest: defaultdict[str, MinimumSince] = defaultdict(MinimumSince)
        self._highest: defaultdict[str, MinimumSince] = defaultdict(MinimumSince)
        """Minima of the negated leads, which give the highest leads."""
        self._num_records = 0
        self._last_records: dict[int, tuple[int, Collection[str]]] = {}

    def leave(self, replica: int) -> None:
        self._last_records.pop(replica, None)

    def record(
        self, replica: int, service: Mapping[str, int], usage: Mapping[str, ClassUsage], demand: ClassDemand
    ) -> Mapping[str, ClassLead]:
        """Add a step. Return, by class, the minimum and maximum lead since the replica's previous call."""
        _add_service(self._leads, service, usage, demand)
        self._num_records = now = self._num_records + 1
        for name in usage:
            self._lowest[name].add(now, self._leads[name])
            self._highest[name].add(now, -self._leads[name])
        since, names = self._last_records.get(replica, (now, ()))
        self._last_records[replica] = now, tuple(usage)
        return {name: ClassLead(self._lowest[name].since(since), -self._highest[name].since(since)) for name in names}


def _add_service(
    leads: Counter[str], service: Mapping[str, int], usage: Mapping[str, ClassUsage], demand: ClassDemand
) -> None:
    """Add the service of a step to `leads`, and reduce all leads by the lowest lead of the classes with demand."""
    leads.update(service)
    least = min([leads[name] for name in demand.classes], default=None)
    for name, each in usage.items():
        leads[name] = 0 if least is None else min(max(0, leads[name] - least), MAX_LEAD_QUANTA * each.quantum)


class MinimumSince:
    """Minimum of a series since a given index. It stores only values below all later values."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._values: list[int] = []

    def add(self, index: int, value: int) -> None:
        while self._values and self._values[-1] >= value:
            del self._indices[-1], self._values[-1]
        self._indices.append(index)
        self._values.append(value)

    def since(self, index: int) -> int:
        return self._values[bisect_left(self._indices, index)]


class _Tenant:
    def __init__(self) -> None:
        self.limit = 0
        self.demands: dict[int, SlotDemand] = {}
        self.changes: Counter[int] = Counter()
        self.last_leases: Counter[int] = Counter()
        """Replica -> sequence number of its latest lease. A lower number is an earlier lease."""
        self.num_leased = 0

    def leased_to(self, replica: int) -> int:
        return self.demands[replica].num_leased + self.changes[replica]

    def num_missing(self, replica: int) -> int:
        demand = self.demands[replica]
        return demand.num_active + demand.num_waiting - self.leased_to(replica)


class TenantSlots:
    """Divides the running slots that a tenant's limit allows among the replicas of a master, as leases. Thread-safe.

    A tenant's leases and the slots of its migrating requests together never exceed its limit. A free slot goes to the
    replica with the fewest leases that needs one; among equals, to the one whose latest lease is the oldest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[int, Callable[[], None]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._pending: dict[int, set[str]] = {}
        self.migrating: dict[str, str] = {}
        self._num_migrating: Counter[str] = Counter()
        self._arrived: dict[int, list[str]] = {}
        self._num_leases = 0

    def join(self, replica: int, wake: Callable[[], None]) -> None:
        """Add a replica. Any thread may call `wake()`, which makes the replica call `exchange` to get its leases."""
        self.leave(replica)
        with self._lock:
            self._wakes[replica] = wake

    def leave(self, replica: int) -> None:
        with self._lock:
            self._wakes.pop(replica, None)
            self._pending.pop(replica, None)
            names = self._pop_arrived(replica)
            for name, tenant in self._tenants.items():
                if replica in tenant.demands:
                    names.add(name)
                    tenant.num_leased -= tenant.leased_to(replica)
                    del tenant.demands[replica], tenant.changes[replica], tenant.last_leases[replica]
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if tenant.demands}
            wakes = self._lease(names)
        for wake in wakes:
            wake()

    def start_migration(self, request_id: str, tenant: str) -> None:
        """Keep the tenant's slot of a request during its migration to another replica. A second call has no effect."""
        with self._lock:
            if request_id not in self.migrating:
                self.migrating[request_id] = tenant
                self._num_migrating[tenant] += 1

    def finish_migration(self, replica: int, request_id: str) -> None:
        """Record that a replica continues the request. The replica's next `exchange` includes the request's slot."""
        with self._lock:
            self._arrived.setdefault(replica, []).append(request_id)

    def end_migration(self, request_id: str) -> None:
        """Free the slot of a request that ended during its migration. Ids of other requests are ignored."""
        with self._lock:
            tenant = self._pop_migrating(request_id)
            wakes = [] if tenant is None else self._lease({tenant})
        for wake in wakes:
            wake()

    def exchange(self, replica: int, demands: Mapping[str, SlotDemand]) -> Mapping[str, int]:
        """Record a replica's changed demands. Return, by tenant, how many slots the replica gains or loses."""
        if not (demands or self._pending.get(replica) or self._arrived.get(replica)):
            return _NO_CHANGES
        with self._lock:
            names = self._pop_arrived(replica)
            for name, demand in demands.items():
                self._update(replica, name, demand)
                names.add(name)
            wakes = self._lease(names, caller=replica)
            pending = self._pending.pop(replica, set())
            changes = {name: self._pop_change(replica, name) for name in sorted(pending | demands.keys())}
        for wake in wakes:
            wake()
        return {name: number for name, number in changes.items() if number}

    def _update(self, replica: int, name: str, demand: SlotDemand) -> None:
        tenant = self._tenants.setdefault(name, _Tenant())
        is_lower = demand.limit < tenant.limit
        tenant.limit = demand.limit
        tenant.num_leased -= tenant.leased_to(replica) if replica in tenant.demands else 0
        tenant.demands[replica] = demand
        tenant.changes[replica] -= max(0, -tenant.num_missing(replica))
        tenant.num_leased += tenant.leased_to(replica)
        for each in [replica, *(other for other in tenant.demands if is_lower and other != replica)]:
            num_excess = tenant.num_leased + self._num_migrating[name] - tenant.limit
            num_returned = min(num_excess, tenant.leased_to(each) - tenant.demands[each].num_active)
            if num_returned > 0:
                tenant.changes[each] -= num_returned
                tenant.num_leased -= num_returned
                self._pending.setdefault(each, set()).add(name)

    def _pop_change(self, replica: int, name: str) -> int:
        tenant = self._tenants.get(name)
        if tenant is None or (demand := tenant.demands.get(replica)) is None:
            return 0
        change = tenant.changes.pop(replica, 0)
        num_leased = demand.num_leased + change
        if num_leased or demand.num_active or demand.num_waiting:
            tenant.demands[replica] = demand._replace(num_leased=num_leased)
        else:
            del tenant.demands[replica], tenant.last_leases[replica]
            if not tenant.demands:
                del self._tenants[name]
        return change

    def _lease(self, names: set[str], caller: int | None = None) -> list[Callable[[], None]]:
        """Give replicas the running slots that these tenants may still use. Return the functions that wake the replicas
        which got a slot, except `caller`.
        """
        got = set()
        for name in sorted(names):
            if (tenant := self._tenants.get(name)) is None:
                continue
            num_free = tenant.limit - self._num_migrating[name] - tenant.num_leased
            missing = [each for each in tenant.demands if tenant.num_missing(each) > 0] if num_free > 0 else []
            while num_free > 0 and missing:
                best = min(missing, key=lambda each: (tenant.leased_to(each), tenant.last_leases[each], each))
                self._num_leases += 1
                num_free, tenant.last_leases[best] = num_free - 1, self._num_leases
                tenant.changes[best] += 1
                tenant.num_leased += 1
                if tenant.num_missing(best) == 0:
                    missing.remove(best)
                got.add(best)
                self._pending.setdefault(best, set()).add(name)
        return [self._wakes[each] for each in sorted(got) if each != caller and each in self._wakes]

    def _pop_arrived(self, replica: int) -> set[str]:
        tenants = [self._pop_migrating(request_id) for request_id in self._arrived.pop(replica, ())]
        return {name for name in tenants if name is not None}

    def _pop_migrating(self, request_id: str) -> str | None:
        tenant = self.migrating.pop(request_id, None)
        if tenant is not None:
            self._num_migrating[tenant] -= 1
            if not self._num_migrating[tenant]:
                del self._num_migrating[tenant]
        return tenant
