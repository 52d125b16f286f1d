"""The waiting requests of one class."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, NamedTuple

from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.fair_share import FairShare
from llm_serving.scheduler.orders import Order

_Key = tuple[float, ...]

MIN_HEAP: Final = 64
"""Entries that are not worth sweeping."""


class _Entry(NamedTuple):
    """One stay of a request in the queue; entries of earlier stays may linger in the heaps and are told by identity."""

    key: _Key
    stay: int
    request: Request


class _Offer(NamedTuple):
    """A tenant's place among the others."""

    served: int
    key: _Key
    """Of its first request."""
    tenant: str


_Heap = list[_Entry]


class ClassQueue:
    """Requests that have run before first; then by the order, which may put others before the oldest.

    The oldest is never overtaken more than `max_overtakes` times in a row. Heaps drop lazily what has left.
    """

    def __init__(self, request_class: RequestClass, max_overtakes: int, order: Order) -> None:
        self.request_class = request_class
        self.shares = FairShare()
        self._order = order
        self._max_overtakes = max_overtakes
        self._num_overtakes = 0
        """Of the oldest, since it became that."""
        self._members: dict[str, _Entry] = {}
        self._num_stays = 0
        self._displaced: _Heap = []
        self.num_returning = 0
        """Members that have run before."""
        self._by_arrival: _Heap = []
        self._by_tenant: dict[str, _Heap] = {}
        """All under one name where the order does not share among tenants."""
        self._tenants: list[_Offer] = []
        """Heap of the tenants that wait; entries may be out of date."""
        self._offers: dict[str, _Offer] = {}
        """The entry of each of them that counts."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self._members.values()])

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    @property
    def may_be_overtaken(self) -> bool:
        """Whether somebody may go before the oldest that came earlier than it."""
        return not self._members or self._num_overtakes < self._max_overtakes

    def overtake(self) -> None:
        """Somebody has a place of the class that goes before those who wait, though it came later."""
        if self._members:
            self._num_overtakes += 1

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        assert request.request_id not in self._members, f"request {request.request_id} waits twice"
        self._num_stays += 1
        entry = _Entry(request.queue_key, self._num_stays, request)
        self._members[request.request_id] = entry
        if request.has_run:
            self.num_returning += 1
            self._push(self._displaced, entry)
            return
        self._push(self._by_arrival, _Entry((request.entered,), self._num_stays, request))
        tenant = self._tenant_of(request)
        if self._first(self._by_tenant.setdefault(tenant, [])) is None:
            self.shares.join(tenant, self._least_served())
        self._push(self._by_tenant[tenant], entry)
        if self._first(self._by_tenant[tenant]) is request:
            heapq.heappush(self._tenants, self._offer(tenant))

    def reorder(self, request: Request) -> None:
        """A member's `queue_key` is another one; when it came, and how often the oldest was overtaken, is not."""
        tenant, entry = self._tenant_of(request), self._members[request.request_id]._replace(key=request.queue_key)
        self._members[request.request_id] = entry
        heap = self._displaced if request.has_run else self._by_tenant[tenant]
        heap[:] = [each for each in heap if each.request is not request and self._counts(each)]
        heap.append(entry)
        heapq.heapify(heap)
        if not request.has_run:
            self._offer(tenant)
            self._tenants = list(self._offers.values())
            heapq.heapify(self._tenants)

    def head(self) -> Request | None:
        """Who goes next; it stays."""
        displaced, oldest = self._first(self._displaced), self._first(self._by_arrival)
        if displaced is not None:
            return displaced
        if oldest is None or self._num_overtakes >= self._max_overtakes:
            return oldest
        tenant = self._least_served_tenant()
        assert tenant is not None
        return self._first(self._by_tenant[tenant])

    def arrival_clock(self) -> int | None:
        """When the one came that has waited longest, of the first to return and the first that came; None: nobody."""
        returning, oldest = self._first(self._displaced), self._first(self._by_arrival)
        if returning is None or oldest is None:
            first = returning or oldest
            return None if first is None else first.arrival_clock
        return min(returning.arrival_clock, oldest.arrival_clock)

    def pop(self, request: Request) -> None:
        """The request has been admitted."""
        if not request.has_run and request is not self._first(self._by_arrival):
            self._num_overtakes += 1
        self.discard(request)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A tenant has been served."""
        if self._order.shares_fairly:
            self.shares.charge(tenant, num_tokens)

    def discard(self, request: Request) -> None:
        """Takes the request out wherever it stands; none of it is fine."""
        if request.request_id not in self._members:
            return
        if request is self._first(self._by_arrival):
            self._num_overtakes = 0
        del self._members[request.request_id]
        self.num_returning -= request.has_run
        tenant = self._tenant_of(request)
        heap = self._by_tenant.get(tenant)
        if heap is not None and self._first(heap) is None:
            del self._by_tenant[tenant], self._offers[tenant]
            self.shares.leave(tenant)

    def _tenant_of(self, request: Request) -> str:
        return request.tenant if self._order.shares_fairly else ""

    def _first(self, heap: _Heap) -> Request | None:
        members = self._members
        while heap:
            _, stay, request = heap[0]
            member = members.get(request.request_id)
            if member is not None and member[1] == stay:
                return request
            heapq.heappop(heap)
        return None

    def _counts(self, entry: _Entry) -> bool:
        member = self._members.get(entry.request.request_id)
        return member is not None and member.stay == entry.stay

    def _push(self, heap: _Heap, entry: _Entry) -> None:
        """Adds an entry; those that have left are swept out before they are the most."""
        if len(heap) > 2 * len(self._members) + MIN_HEAP:
            heap[:] = [each for each in heap if self._counts(each)]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

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
