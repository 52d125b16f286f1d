"""The waiting requests of one class."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.fair_share import FairShare


class _Entry(NamedTuple):
    """One stay of a request in the queue; entries of earlier stays may linger in the heaps and are told by identity."""

    key: tuple[int, int, int]
    stay: int
    request: Request


class _Offer(NamedTuple):
    """A tenant's place among the others."""

    served: int
    key: tuple[int, int, int]
    """Of its first request."""
    tenant: str


_Heap = list[_Entry]


class ClassQueue:
    """Requests that have run before first; then by `queue_key`, in which tenants may overtake each other for fairness.

    The first by key is never overtaken more than `max_overtakes` times in a row. Heaps drop lazily what has left.
    """

    def __init__(self, request_class: RequestClass, max_overtakes: int) -> None:
        self.request_class = request_class
        self.shares = FairShare()
        self._max_overtakes = max_overtakes
        self._num_overtakes = 0
        """Of the first by key, since it became that."""
        self._members: dict[str, _Entry] = {}
        self._num_stays = 0
        self._displaced: _Heap = []
        self._all: _Heap = []
        self._by_tenant: dict[str, _Heap] = {}
        self._tenants: list[_Offer] = []
        """Heap of the tenants that wait; entries may be out of date."""
        self._offers: dict[str, _Offer] = {}
        """The entry of each of them that counts."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._members.values())

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        assert request.request_id not in self._members, f"request {request.request_id} waits twice"
        self._num_stays += 1
        entry = _Entry(request.queue_key, self._num_stays, request)
        self._members[request.request_id] = entry
        if request.has_run:
            heapq.heappush(self._displaced, entry)
            return
        heapq.heappush(self._all, entry)
        if self._max_overtakes == 0:
            return
        tenant = request.tenant
        if self._first(self._by_tenant.setdefault(tenant, [])) is None:
            self.shares.join(tenant, self._least_served())
        heapq.heappush(self._by_tenant[tenant], entry)
        if self._first(self._by_tenant[tenant]) is request:
            heapq.heappush(self._tenants, self._offer(tenant))

    def head(self) -> Request | None:
        """Who goes next; it stays."""
        displaced, first = self._first(self._displaced), self._first(self._all)
        if displaced is not None:
            return displaced
        if first is None or self._num_overtakes >= self._max_overtakes:
            return first
        tenant = self._least_served_tenant()
        assert tenant is not None
        return self._first(self._by_tenant[tenant])

    def oldest(self) -> Request | None:
        """First in the order that nobody may overtake for ever."""
        return self._first(self._displaced) or self._first(self._all)

    def pop(self, request: Request) -> None:
        """The request has been admitted."""
        first = self._first(self._all)
        if not request.has_run and request is not first:
            self._num_overtakes += 1
        self.discard(request)

    def discard(self, request: Request) -> None:
        """Takes the request out wherever it stands; none of it is fine."""
        if request.request_id not in self._members:
            return
        if request is self._first(self._all):
            self._num_overtakes = 0
        del self._members[request.request_id]
        heap = self._by_tenant.get(request.tenant)
        if heap is not None and self._first(heap) is None:
            del self._by_tenant[request.tenant], self._offers[request.tenant]
            self.shares.leave(request.tenant)

    def _first(self, heap: _Heap) -> Request | None:
        while heap:
            entry = heap[0]
            if self._members.get(entry.request.request_id) is entry:
                return entry.request
            heapq.heappop(heap)
        return None

    def _offer(self, tenant: str) -> _Offer:
        first = self._first(self._by_tenant[tenant])
        assert first is not None
        offer = self._offers[tenant] = _Offer(self.shares.served(tenant), first.queue_key, tenant)
        return offer

    def _least_served_tenant(self) -> str | None:
        while self._tenants:
            offer = self._tenants[0]
            if self._offers.get(offer.tenant) is offer:
                first = self._first(self._by_tenant[offer.tenant])
                if first is not None and offer[:2] == (self.shares.served(offer.tenant), first.queue_key):
                    return offer.tenant
                heapq.heapreplace(self._tenants, self._offer(offer.tenant))
            else:
                heapq.heappop(self._tenants)
        return None

    def _least_served(self) -> int | None:
        tenant = self._least_served_tenant()
        return None if tenant is None else self.shares.served(tenant)
