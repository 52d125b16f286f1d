"""Places that a tenant's `max_running` gives it, dealt out among the replicas: so the limit is one of the whole."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from llm_serving.scheduler.tenant_limits import SlotDemand

_NOTHING: Final[Mapping[str, int]] = {}


class _Tenant:
    """What the replicas need of one tenant's places."""

    def __init__(self) -> None:
        self.limit = 0
        self.needs: dict[int, SlotDemand] = {}
        """By replica, as it told last."""
        self.more: Counter[int] = Counter()
        """By replica: places it has been dealt beyond that, or is to give back."""
        self.dealt_at: Counter[int] = Counter()
        """By replica: the number of the deal that gave it its newest place."""
        self.num_held = 0
        """Places that all replicas hold."""

    def held(self, replica: int) -> int:
        return self.needs[replica].num_leased + self.more[replica]

    def num_lacking(self, replica: int) -> int:
        """Places that it could use beyond those it holds."""
        need = self.needs[replica]
        return need.num_active + need.num_waiting - self.held(replica)


class TenantSlots:
    """One for all replicas of a master; each engine's thread asks between two steps.

    All that replicas hold never comes to more than the limit. A scheduler gives a place back when a request leaves it.
    That goes to whoever holds the fewest, of those that lack one; of these to the one whose last deal is the oldest, so
    a single place goes round. Requests that move from replica to replica keep theirs on the way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nudges: dict[int, Callable[[], None]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._told: dict[int, set[str]] = {}
        """By replica: tenants of which it is to be told something."""
        self._on_way: dict[str, str] = {}
        """Requests between two replicas, and their tenants."""
        self._num_on_way: Counter[str] = Counter()
        self._arrived: dict[int, list[str]] = {}
        """By replica: those it has got since it told its needs."""
        self._num_deals = 0

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        needing = (replica for tenant in self._tenants.values() for replica in tenant.needs)
        return {*self._nudges, *self._told, *self._arrived, *needing}

    def join(self, replica: int, nudge: Callable[[], None]) -> None:
        """A replica begins to serve.

        Args:
            nudge: Has its thread `settle`; may be called from any thread.
        """
        self.leave(replica)
        with self._lock:
            self._nudges[replica] = nudge

    def leave(self, replica: int) -> None:
        """A replica serves no longer: what it held is free."""
        with self._lock:
            self._nudges.pop(replica, None)
            self._told.pop(replica, None)
            names = self._take_arrived(replica)
            for name, tenant in self._tenants.items():
                if replica in tenant.needs:
                    names.add(name)
                    tenant.num_held -= tenant.held(replica)
                    del tenant.needs[replica], tenant.more[replica], tenant.dealt_at[replica]
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if tenant.needs}
            nudges = self._deal(names)
        for nudge in nudges:
            nudge()

    def depart(self, request_id: str, tenant: str) -> None:
        """A request leaves a replica, for another one; its place goes along. Twice changes nothing."""
        with self._lock:
            if request_id not in self._on_way:
                self._on_way[request_id] = tenant
                self._num_on_way[tenant] += 1

    def arrive(self, replica: int, request_id: str) -> None:
        """A replica goes on with it; its scheduler counts the place from now on."""
        with self._lock:
            self._arrived.setdefault(replica, []).append(request_id)

    def on_way(self) -> list[str]:
        """Requests that are between two replicas."""
        with self._lock:
            return list(self._on_way)

    def forget(self, request_id: str) -> None:
        """A request has ended, perhaps on its way."""
        if request_id not in self._on_way:
            return
        with self._lock:
            nudges = self._deal({name} if (name := self._take_from_way(request_id)) is not None else set())
        for nudge in nudges:
            nudge()

    def settle(self, replica: int, needs: Mapping[str, SlotDemand]) -> Mapping[str, int]:
        """Tells what has changed at a replica; returns how many places more each tenant may take there, or less."""
        if not (needs or self._told.get(replica) or self._arrived.get(replica)):
            return _NOTHING
        with self._lock:
            names = self._take_arrived(replica)
            for name, need in needs.items():
                self._note(replica, name, need)
                names.add(name)
            nudges = self._deal(names, but=replica)
            told = self._told.pop(replica, set())
            more = {name: self._take_more(replica, name) for name in sorted(told | needs.keys())}
        for nudge in nudges:
            nudge()
        return {name: number for name, number in more.items() if number}

    def _note(self, replica: int, name: str, need: SlotDemand) -> None:
        """What it has and does not need it gives back; by a lower limit, others what they have not taken."""
        tenant = self._tenants.setdefault(name, _Tenant())
        is_lower = need.limit < tenant.limit
        tenant.limit = need.limit
        tenant.num_held -= tenant.held(replica) if replica in tenant.needs else 0
        tenant.needs[replica] = need
        tenant.more[replica] -= max(0, -tenant.num_lacking(replica))
        tenant.num_held += tenant.held(replica)
        for each in [replica, *(other for other in tenant.needs if is_lower and other != replica)]:
            beyond = tenant.num_held + self._num_on_way[name] - tenant.limit
            spare = min(beyond, tenant.held(each) - tenant.needs[each].num_active)
            if spare > 0:
                tenant.more[each] -= spare
                tenant.num_held -= spare
                self._told.setdefault(each, set()).add(name)

    def _take_more(self, replica: int, name: str) -> int:
        """What the replica's scheduler is told now it has from now on."""
        tenant = self._tenants.get(name)
        if tenant is None or (need := tenant.needs.get(replica)) is None:
            return 0
        more = tenant.more.pop(replica, 0)
        part = need.num_leased + more
        if part or need.num_active or need.num_waiting:
            tenant.needs[replica] = need._replace(num_leased=part)
        else:
            del tenant.needs[replica], tenant.dealt_at[replica]
            if not tenant.needs:
                del self._tenants[name]
        return more

    def _deal(self, names: set[str], but: int | None = None) -> list[Callable[[], None]]:
        """Deals out what is free of these tenants' places; returns the nudges of those that got some."""
        got = set()
        for name in sorted(names):
            if (tenant := self._tenants.get(name)) is None:
                continue
            free = tenant.limit - self._num_on_way[name] - tenant.num_held
            lacking = [each for each in tenant.needs if tenant.num_lacking(each) > 0] if free > 0 else []
            while free > 0 and lacking:
                best = min(lacking, key=lambda each: (tenant.held(each), tenant.dealt_at[each], each))
                self._num_deals += 1
                free, tenant.dealt_at[best] = free - 1, self._num_deals
                tenant.more[best] += 1
                tenant.num_held += 1
                if tenant.num_lacking(best) == 0:
                    lacking.remove(best)
                got.add(best)
                self._told.setdefault(best, set()).add(name)
        return [self._nudges[each] for each in sorted(got) if each != but and each in self._nudges]

    def _take_arrived(self, replica: int) -> set[str]:
        taken = [self._take_from_way(request_id) for request_id in self._arrived.pop(replica, ())]
        return {name for name in taken if name is not None}

    def _take_from_way(self, request_id: str) -> str | None:
        tenant = self._on_way.pop(request_id, None)
        if tenant is not None:
            self._num_on_way[tenant] -= 1
            if not self._num_on_way[tenant]:
                del self._num_on_way[tenant]
        return tenant
