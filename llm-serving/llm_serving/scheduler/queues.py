"""The waiting queues: which class is next, which request within it, and the sort keys of requests."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.bounds import MIN_HEAP
from llm_serving.scheduler.fair_sharing import TenantTokenCounters, WeightedFairSharing
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policies import Order, Policy

_Key = tuple[float, ...]


class _Entry(NamedTuple):
    """A request's entry in a heap of its class. It is outdated if the request has left the queue since."""

    key: _Key
    stay: int
    request: Request


class _TenantEntry(NamedTuple):
    served: int
    key: _Key
    tenant: str


_Heap = list[_Entry]


class ClassQueue:
    """Waiting requests of one class. Preempted requests go first. New requests follow in the configured order, which
    bypasses the oldest at most `max_overtakes` times in a row.
    """

    def __init__(self, request_class: RequestClass, max_overtakes: int, order: Order) -> None:
        self.request_class = request_class
        self.token_counters = TenantTokenCounters()
        self._order = order
        self._max_overtakes = max_overtakes
        self._num_bypasses = 0
        self._members: dict[str, _Entry] = {}
        self._num_stays = 0
        self._returning: _Heap = []
        self.num_returning = 0
        self._by_arrival: _Heap = []
        self._by_tenant: dict[str, _Heap] = {}
        """Tenant -> heap of its requests. Without sharing among tenants, all requests are under ""."""
        self._tenants: list[_TenantEntry] = []
        self._tenant_entries: dict[str, _TenantEntry] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self._members.values()])

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    @property
    def can_be_bypassed(self) -> bool:
        return not self._members or self._num_bypasses < self._max_overtakes

    def record_bypass(self) -> None:
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
        tenant = request.tenant if self._order.shares_fairly else ""
        if tenant not in self._by_tenant:
            least = self._least_served_tenant()
            self.token_counters.join(tenant, None if least is None else self.token_counters.served(least))
            self._by_tenant[tenant] = []
        self._push(self._by_tenant[tenant], entry)
        if self._first(self._by_tenant[tenant]) is request:
            heapq.heappush(self._tenants, self._update_entry(tenant))

    def reorder(self, request: Request) -> None:
        """Move a queued request to the place of its changed `queue_key`. The count for `max_overtakes` is kept."""
        entry = self._members[request.request_id]._replace(key=request.queue_key)
        self._members[request.request_id] = entry
        tenant = request.tenant if self._order.shares_fairly else ""
        heap = self._returning if request.has_run else self._by_tenant[tenant]
        heap[:] = [each for each in heap if each.request is not request and self._is_current(each)]
        heap.append(entry)
        heapq.heapify(heap)
        if not request.has_run:
            self._update_entry(tenant)
            self._tenants = list(self._tenant_entries.values())
            heapq.heapify(self._tenants)

    def peek(self) -> Request | None:
        returning, oldest = self._first(self._returning), self._first(self._by_arrival)
        if returning is not None:
            return returning
        if oldest is None or self._num_bypasses >= self._max_overtakes:
            return oldest
        tenant = self._least_served_tenant()
        assert tenant is not None
        return self._first(self._by_tenant[tenant])

    def arrival_clock(self) -> int | None:
        """Return how many steps its class had counted when the oldest request arrived, or None for an empty queue."""
        returning, oldest = self._first(self._returning), self._first(self._by_arrival)
        if returning is None or oldest is None:
            first = returning or oldest
            return None if first is None else first.arrival_clock
        return min(returning.arrival_clock, oldest.arrival_clock)

    def pop(self, request: Request) -> None:
        if not request.has_run and request is not self._first(self._by_arrival):
            self._num_bypasses += 1
        self.discard(request)

    def discard(self, request: Request) -> None:
        if request.request_id not in self._members:
            return
        if request is self._first(self._by_arrival):
            self._num_bypasses = 0
        del self._members[request.request_id]
        self.num_returning -= request.has_run
        tenant = request.tenant if self._order.shares_fairly else ""
        heap = self._by_tenant.get(tenant)
        if heap is not None and self._first(heap) is None:
            del self._by_tenant[tenant], self._tenant_entries[tenant]
            self.token_counters.leave(tenant)

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
        if len(heap) > 2 * len(self._members) + MIN_HEAP:
            heap[:] = [each for each in heap if self._is_current(each)]
            heapq.heapify(heap)
        heapq.heappush(heap, entry)

    def _update_entry(self, tenant: str) -> _TenantEntry:
        first = self._first(self._by_tenant[tenant])
        assert first is not None
        entry = self._tenant_entries[tenant] = _TenantEntry(self.token_counters.served(tenant), first.queue_key, tenant)
        return entry

    def _least_served_tenant(self) -> str | None:
        while self._tenants:
            entry = self._tenants[0]
            if self._tenant_entries.get(entry.tenant) is entry:
                first = self._first(self._by_tenant[entry.tenant])
                if first is not None and entry[:2] == (self.token_counters.served(entry.tenant), first.queue_key):
                    return entry.tenant
                heapq.heapreplace(self._tenants, self._update_entry(entry.tenant))
            else:
                heapq.heappop(self._tenants)
        return None


class WaitingQueue:
    """The queues of all classes. Higher classes go first, but no class starves.

    Once the oldest request of a class has waited `ageing_steps`, the class shares with higher classes by weight. A
    priority that grows with age would instead turn into first come, first served under overload. Each class measures
    waits by its own clock, which counts the steps that could have scheduled the class.
    """

    def __init__(self, classes: Sequence[RequestClass], limits: SchedulerLimits, order: Order, num_blocks: int) -> None:
        self.queues = {each.name: ClassQueue(each, limits.max_overtakes, order) for each in classes}
        self.sharing = WeightedFairSharing(classes, limits, num_blocks)
        self.clocks = dict.fromkeys(self.queues, 0)
        self.service: dict[tuple[str, str], int] = {}
        """(class, tenant) -> virtual tokens that this scheduler has not yet reported to the other schedulers."""
        self._shares_among_tenants = order.shares_fairly

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.queues.values())

    def discard(self, request: Request) -> None:
        self.queues[request.request_class.name].discard(request)

    def update_contenders(
        self, closed: Collection[str], held: Mapping[str, int], aged_prefills: Collection[str] = ()
    ) -> list[str]:
        """Determine which classes may admit requests. Return the classes with waiting requests, except `closed`.
        `closed`: classes at their share limit. `held`: class -> number of running slots. `aged_prefills`: classes with
        a prompt that is incomplete `ageing_steps` after its admission.
        """
        waiting, aged = [], [*aged_prefills]
        for name, queue in self.queues.items():
            if len(queue) and name not in closed and (arrival := queue.arrival_clock()) is not None:
                waiting.append(name)
                if self.clocks[name] - arrival >= queue.request_class.ageing_steps:
                    aged.append(name)
        self.sharing.update_contenders(waiting, aged, held)
        return waiting

    def peek(self, closed: Collection[str], held: Mapping[str, int], blocks: Mapping[str, int]) -> Request | None:
        """Return the next request to admit, or None. `closed` classes admit none. `held`, `blocks`: class -> number."""
        name = self.sharing.next_class(self.update_contenders(closed, held), held, blocks)
        return None if name is None else self.queues[name].peek()

    def charge(self, charges: Mapping[tuple[str, str], int]) -> None:
        """Charge tenants for the tokens of a step. `charges`: (class, tenant) -> tokens; output tokens count more."""
        if not self._shares_among_tenants:
            return
        for (name, tenant), num_tokens in charges.items():
            self.queues[name].token_counters.charge(tenant, num_tokens)
            if self.sharing.is_shared:
                self.service[name, tenant] = self.service.get((name, tenant), 0) + num_tokens

    def charge_remote(self, service: Mapping[tuple[str, str], int]) -> None:
        if not self._shares_among_tenants:
            return
        for (name, tenant), num_tokens in service.items():
            if (queue := self.queues.get(name)) is not None:  # another replica may have reloaded other classes already
                queue.token_counters.charge(tenant, num_tokens)

    def tick(self, closed: Collection[str]) -> None:
        for name in self.clocks:
            if name not in closed:
                self.clocks[name] += 1


Key = tuple[int, float, int, int]
"""(rank of the class, sort key of the order, arrival step shifted by the priority, `Request.sequence`)."""


class QueueKeys:
    def __init__(self, policy: Policy, order: Order, limits: SchedulerLimits) -> None:
        self._honours_classes = policy.honours_classes
        self._order = order
        self._max_priority_boost = limits.max_head_start_steps

    def key_of(self, request: Request) -> Key:
        rank = request.request_class.rank
        if not self._honours_classes:
            return rank, 0.0, 0, request.sequence
        step = request.class_entry_step
        if request.priority != rank:
            step += self._priority_boost(request)
        return rank, self._order.sort_key(request), step, request.sequence

    def with_priority(self, request: Request, priority: int) -> Key:
        rank, order_key, step, sequence = request.queue_key
        step -= self._priority_boost(request)
        request.priority = priority
        return rank, order_key, step + self._priority_boost(request), sequence

    def _priority_boost(self, request: Request) -> int:
        """Return by how many steps the priority shifts the request's arrival in queue order. Negative is earlier."""
        if not self._honours_classes:
            return 0
        boost = (request.priority - request.request_class.rank) * request.request_class.ageing_steps
        return max(-self._max_priority_boost, min(self._max_priority_boost, boost))
