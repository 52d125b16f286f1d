"""All waiting requests: which class is next, and who within it.

The waiting requests of one class.

The key of a request: its place among all others, waiting or running.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.fair_sharing import WeightedFairSharing
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import Order, TenantTokenCounters
from llm_serving.scheduler.policies import Policy

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
        self.token_counters = TenantTokenCounters()
        self._order = order
        self._max_overtakes = max_overtakes
        self._num_bypasses = 0
        """Of the oldest, since it became that."""
        self._members: dict[str, _Entry] = {}
        self._num_stays = 0
        self._returning: _Heap = []
        self.num_returning = 0
        """Members that have run before."""
        self._by_arrival: _Heap = []
        self._by_tenant: dict[str, _Heap] = {}
        """All under one name where the order does not share among tenants."""
        self._tenants: list[_Offer] = []
        """Heap of the tenants that wait; entries may be out of date."""
        self._tenant_entries: dict[str, _Offer] = {}
        """The entry of each of them that counts."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self._members.values()])

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    @property
    def can_be_bypassed(self) -> bool:
        """Whether somebody may go before the oldest that came earlier than it."""
        return not self._members or self._num_bypasses < self._max_overtakes

    def record_bypass(self) -> None:
        """Somebody has a place of the class that goes before those who wait, though it came later."""
        if self._members:
            self._num_bypasses += 1

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        assert request.request_id not in self._members, f"request {request.request_id} waits twice"
        self._num_stays += 1
        entry = _Entry(request.queue_key, self._num_stays, request)
        self._members[request.request_id] = entry
        if request.has_run:
            self.num_returning += 1
            self._push(self._returning, entry)
            return
        self._push(self._by_arrival, _Entry((request.class_sequence,), self._num_stays, request))
        tenant = self._tenant_of(request)
        if self._first(self._by_tenant.setdefault(tenant, [])) is None:
            self.token_counters.join(tenant, self._least_served())
        self._push(self._by_tenant[tenant], entry)
        if self._first(self._by_tenant[tenant]) is request:
            heapq.heappush(self._tenants, self._update_entry(tenant))

    def reorder(self, request: Request) -> None:
        """A member's `queue_key` is another one; when it came, and how often the oldest was overtaken, is not."""
        tenant, entry = self._tenant_of(request), self._members[request.request_id]._replace(key=request.queue_key)
        self._members[request.request_id] = entry
        heap = self._returning if request.has_run else self._by_tenant[tenant]
        heap[:] = [each for each in heap if each.request is not request and self._is_current(each)]
        heap.append(entry)
        heapq.heapify(heap)
        if not request.has_run:
            self._update_entry(tenant)
            self._tenants = list(self._tenant_entries.values())
            heapq.heapify(self._tenants)

    def peek(self) -> Request | None:
        """Who goes next; it stays."""
        displaced, oldest = self._first(self._returning), self._first(self._by_arrival)
        if displaced is not None:
            return displaced
        if oldest is None or self._num_bypasses >= self._max_overtakes:
            return oldest
        tenant = self._least_served_tenant()
        assert tenant is not None
        return self._first(self._by_tenant[tenant])

    def arrival_clock(self) -> int | None:
        """When the one came that has waited longest, of the first to return and the first that came; None: nobody."""
        returning, oldest = self._first(self._returning), self._first(self._by_arrival)
        if returning is None or oldest is None:
            first = returning or oldest
            return None if first is None else first.arrival_clock
        return min(returning.arrival_clock, oldest.arrival_clock)

    def pop(self, request: Request) -> None:
        """The request has been admitted."""
        if not request.has_run and request is not self._first(self._by_arrival):
            self._num_bypasses += 1
        self.discard(request)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A tenant has been served."""
        if self._order.shares_fairly:
            self.token_counters.charge(tenant, num_tokens)

    def discard(self, request: Request) -> None:
        """Takes the request out wherever it stands; none of it is fine."""
        if request.request_id not in self._members:
            return
        if request is self._first(self._by_arrival):
            self._num_bypasses = 0
        del self._members[request.request_id]
        self.num_returning -= request.has_run
        tenant = self._tenant_of(request)
        heap = self._by_tenant.get(tenant)
        if heap is not None and self._first(heap) is None:
            del self._by_tenant[tenant], self._tenant_entries[tenant]
            self.token_counters.leave(tenant)

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

    def _is_current(self, entry: _Entry) -> bool:
        member = self._members.get(entry.request.request_id)
        return member is not None and member.stay == entry.stay

    def _push(self, heap: _Heap, entry: _Entry) -> None:
        """Adds an entry; those that have left are swept out before they are the most."""
        if len(heap) > 2 * len(self._members) + MIN_HEAP:
            heap[:] = [each for each in heap if self._is_current(each)]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def _update_entry(self, tenant: str) -> _Offer:
        first = self._first(self._by_tenant[tenant])
        assert first is not None
        offer = self._tenant_entries[tenant] = _Offer(self.token_counters.served(tenant), first.queue_key, tenant)
        return offer

    def _least_served_tenant(self) -> str | None:
        while self._tenants:
            offer = self._tenants[0]
            if self._tenant_entries.get(offer.tenant) is offer:
                first = self._first(self._by_tenant[offer.tenant])
                if first is not None and offer[:2] == (self.token_counters.served(offer.tenant), first.queue_key):
                    return offer.tenant
                heapq.heapreplace(self._tenants, self._update_entry(offer.tenant))
            else:
                heapq.heappop(self._tenants)
        return None

    def _least_served(self) -> int | None:
        tenant = self._least_served_tenant()
        return None if tenant is None else self.token_counters.served(tenant)


class WaitingQueue:
    """Higher classes first, but none starves: a class whose oldest request has waited `ageing_steps` takes turns with
    the higher ones by weight. An ageing that only adds to a priority would end in first come, first served as soon as
    the backlog is older than the ageing; shares stay shares.

    Each class has a clock, which counts the steps it could take part in. Waits are read off it.
    """

    def __init__(self, classes: Sequence[RequestClass], limits: SchedulerLimits, order: Order, num_blocks: int) -> None:
        """Classes in ascending order of rank; `num_blocks` of the cache."""
        self.queues = {each.name: ClassQueue(each, limits.max_overtakes, order) for each in classes}
        self.sharing = WeightedFairSharing(classes, limits, num_blocks)
        self.clocks = dict.fromkeys(self.queues, 0)

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Request]:
        """All members, in no particular order."""
        return chain.from_iterable(self.queues.values())

    def push(self, request: Request) -> None:
        self.queues[request.request_class.name].push(request)

    def discard(self, request: Request) -> None:
        self.queues[request.request_class.name].discard(request)

    def update_contenders(
        self, closed: Collection[str], held: Mapping[str, int], late: Collection[str] = ()
    ) -> list[str]:
        """Notes who contends; to be called before questions, whenever somebody came or went.

        Args:
            closed: Classes that are passed over.
            held: Places of each class.
            late: Classes with a prompt that has had a place for `ageing_steps` and is not computed.

        Returns:
            Those with somebody who waits and may be admitted.
        """
        waiting, aged = [], [*late]
        for name, queue in self.queues.items():
            if len(queue) and name not in closed and (arrival := queue.arrival_clock()) is not None:
                waiting.append(name)
                if self.clocks[name] - arrival >= queue.request_class.ageing_steps:
                    aged.append(name)
        self.sharing.update_contenders(waiting, aged, held)
        return waiting

    def peek(self, closed: Collection[str], held: Mapping[str, int], blocks: Mapping[str, int]) -> Request | None:
        """Who is to be admitted next; it stays. Classes hold so many places and blocks."""
        name = self.sharing.next_class(self.update_contenders(closed, held), held, blocks)
        return None if name is None else self.queues[name].peek()

    def pop(self, request: Request) -> None:
        """Takes out what `best` returned: it is admitted."""
        self.queues[request.request_class.name].pop(request)

    def tick(self, closed: Collection[str]) -> None:
        """A step has been formed; classes in `closed` could not take part in it."""
        for name in self.clocks:
            if name not in closed:
                self.clocks[name] += 1


Key = tuple[int, float, int, int]
"""Rank of the class, place by the order, step of arrival moved by the priority, sequence."""


class QueueKeys:
    """By class, then by the order, then by arrival, which a priority moves within its class."""

    def __init__(self, policy: Policy, order: Order, limits: SchedulerLimits) -> None:
        self._honours_classes = policy.honours_classes
        self._order = order
        self._max_priority_boost = limits.max_head_start_steps

    def key_of(self, request: Request) -> Key:
        """Of a request that is in its class."""
        rank = request.request_class.rank
        if not self._honours_classes:
            return rank, 0.0, 0, request.sequence
        step = request.class_entry_step + self._priority_boost(request)
        return rank, self._order.sort_key(request), step, request.sequence

    def with_priority(self, request: Request, priority: int) -> Key:
        """Of the request had it come to its class with this priority; it has it from now on."""
        rank, place, step, sequence = request.queue_key
        step -= self._priority_boost(request)
        request.priority = priority
        return rank, place, step + self._priority_boost(request), sequence

    def _priority_boost(self, request: Request) -> int:
        """Steps by which its priority moves it within its class; negative ones forward."""
        if not self._honours_classes:
            return 0
        head_start = (request.priority - request.request_class.rank) * request.request_class.ageing_steps
        return max(-self._max_priority_boost, min(self._max_priority_boost, head_start))
