"""All requests without a running slot, their wait bounds, and changes of their priority."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from llm_serving.core.request import RUNNING, Request, RequestStatus
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.scheduler.bounds import WaitMonitor
from llm_serving.scheduler.queues import QueueKeys, WaitingQueue
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.tenant_limits import LimiterChanges, TenantLimiter


@dataclass(eq=False)
class WaitingRequests:
    """All requests without a slot: queued, held by a tenant limit, paused, and forks that wait for their parent."""

    queue: WaitingQueue
    tenant_limiter: TenantLimiter
    monitor: WaitMonitor
    _slots: RunningSlots
    forks: dict[str, list[Request]] = field(default_factory=dict, init=False)
    paused: list[Request] = field(default_factory=list, init=False)
    num_arrivals: int = field(default=0, init=False)
    num_admitted: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.queue, *self.forks.values(), self.tenant_limiter.held_requests(), self.paused)

    def release_forks(self, parent: Request) -> None:
        for fork in self.forks.pop(parent.request_id, []):
            self.enqueue(fork)

    def num_steps_waited(self) -> dict[int, int]:
        return {request.sequence: self.monitor.num_steps_waited(request) for request in self.queue}

    def adopt(self, before: WaitingRequests, num_waited: Mapping[int, int], requests: Iterable[Request]) -> None:
        """Take over all waiting requests from `before` at a reload, in order of arrival and with new wait bounds.
        `num_waited`: `Request.sequence` -> number of steps waited before. `requests`: all unfinished requests.
        """
        self.forks, self.paused = before.forks, before.paused
        self.num_arrivals, self.num_admitted = before.num_arrivals, before.num_admitted
        self.tenant_limiter.adopt(before.tenant_limiter)
        for request in requests:
            if request.has_run or request.transfer is not None:
                self.tenant_limiter.record_admission(request)
        waiting = [*before.queue, *before.tenant_limiter.held_requests()]
        for request in sorted(waiting, key=lambda each: (not each.has_run, each.class_sequence)):
            self.enqueue(request, num_waited.get(request.sequence, 0))

    def pause(self, request: Request) -> None:
        self.queue.discard(request)
        self.paused.append(request)

    def resume(self, request: Request) -> None:
        if request in self.paused:
            self.paused.remove(request)
            self.enqueue(request)

    def enqueue(self, request: Request, num_waited: int = 0) -> None:
        """Queue a request that has waited `num_waited` steps. If its tenant is at its limit, hold it instead."""
        is_limited = self.tenant_limiter.is_active and not request.has_run
        changes = self.tenant_limiter.add(request) if is_limited else None
        if changes is None or request in changes.released:
            self.set_wait_bound(request, num_waited)
            self.queue.queues[request.request_class.name].push(request)
        else:
            self.monitor.forget(request)
        if changes is not None:
            self.apply_limiter_changes(changes, request)

    def enqueue_migrated(self, request: Request, num_waited: int) -> None:
        self.apply_limiter_changes(self.tenant_limiter.add_migrated(request))
        self.enqueue(request, num_waited)

    def requeue(self, request: Request) -> None:
        """Queue a preempted request; if it is paused, add it to `paused` instead."""
        request.status = RequestStatus.WAITING
        if request.paused:
            self.paused.append(request)
        else:
            self.enqueue(request)

    def record_admission(self, request: Request) -> None:
        request.admission_number = self.num_admitted
        self.num_admitted += 1
        self.queue.queues[request.request_class.name].pop(request)
        self.monitor.record_admission(request)
        if self.tenant_limiter.is_active:
            self.apply_limiter_changes(self.tenant_limiter.record_admission(request))

    def remove(self, request: Request) -> None:
        self.monitor.forget(request)
        if request in self.paused:
            self.paused.remove(request)
            return
        self.queue.discard(request)
        siblings = self.forks.get(request.fork_of or "", [])
        if request in siblings:
            siblings.remove(request)

    def apply_limiter_changes(self, changes: LimiterChanges, but: Request | None = None) -> None:
        """Remove held requests from the queue. Append released requests, except `but`, which the caller has queued."""
        for request in changes.held:
            self.queue.discard(request)
            self.monitor.forget(request)
        for request in changes.released:
            if request is but:
                continue
            request.class_sequence = self.num_arrivals
            self.set_wait_bound(request)
            self.queue.queues[request.request_class.name].push(request)

    def set_wait_bound(self, request: Request, num_waited: int = 0) -> None:
        name = request.request_class.name
        queue = self.queue.queues[name]
        num_ahead = len(queue) - queue.num_returning
        for fork in chain(*self.forks.values()):
            num_ahead += fork.request_class.name == name
        num_returning = queue.num_returning + self._slots.slots_by_class[name]
        for paused in self.paused:
            num_returning += paused.request_class.name == name
        self.monitor.start_wait(request, num_ahead, num_returning, num_waited)

    def check_integrity(self) -> None:
        assert all(request.paused for request in self.paused)
        assert not any(request.paused for request in chain(self.queue, *self.forks.values()))
        assert not any(request.has_run for request in self.tenant_limiter.held_requests())


@dataclass(eq=False)
class PriorityChanger:
    """Changes the priority of waiting and running requests. The wait bounds of all other requests still hold."""

    _classes: Sequence[RequestClass]
    _keys: QueueKeys
    _slots: RunningSlots
    _waiting_requests: WaitingRequests

    def set_priority(self, request: Request, priority: int, step: int) -> bool:
        new_class, limiter = class_of(priority, self._classes), self._waiting_requests.tenant_limiter
        was_held = limiter.is_held(request)
        if was_held:
            self._waiting_requests.apply_limiter_changes(limiter.remove(request))
        if request.request_class is new_class:
            self._change_within_class(request, priority, was_held)
            return True
        return self._change_class(request, priority, new_class, step, was_held)

    def _change_within_class(self, request: Request, priority: int, was_held: bool) -> None:
        queue = self._waiting_requests.queue.queues[request.request_class.name]
        is_queued = request in queue
        with self._slots.reinserting(request):
            request.queue_key = self._keys.with_priority(request, priority)
        if was_held:
            self._waiting_requests.enqueue(request)
        elif is_queued:
            queue.reorder(request)

    def _change_class(
        self, request: Request, priority: int, new_class: RequestClass, step: int, was_held: bool
    ) -> bool:
        waiting = self._waiting_requests
        old_queue, new_queue = (waiting.queue.queues[each.name] for each in (request.request_class, new_class))
        is_queued, runs = request in old_queue, request.status is RUNNING
        if request.has_run:
            if not new_queue.can_be_bypassed or self._slots.is_at_limit(request, new_class):
                return False
            new_queue.record_bypass()
        num_waited = waiting.monitor.num_steps_waited(request) if is_queued else 0
        if is_queued:
            old_queue.discard(request)
            if not waiting.tenant_limiter.holds_slot(request):
                waiting.apply_limiter_changes(waiting.tenant_limiter.remove(request))
        with self._slots.reinserting(request):
            self._set_class(request, priority, new_class, step)
        if runs:
            request.class_change_step = step
        if is_queued or was_held:
            waiting.enqueue(request, num_waited)
        return True

    def _set_class(self, request: Request, priority: int, request_class: RequestClass, step: int) -> None:
        clocks = self._waiting_requests.queue.clocks
        age = clocks[request.request_class.name] - request.arrival_clock
        request.priority, request.request_class = priority, request_class
        request.class_sequence = self._waiting_requests.num_arrivals
        request.arrival_clock = clocks[request_class.name] - age
        request.class_entry_step = step
        request.queue_key = self._keys.key_of(request)
