"""Another priority for a request that is on its way, and with it perhaps another class."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.scheduler.queues import QueueKeys
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.waiting import WaitingRequests


class PriorityChanger:
    """Moves requests within and between classes, so that nobody who waits is promised less for it."""

    def __init__(
        self, classes: Sequence[RequestClass], keys: QueueKeys, places: RunningSlots, waits: WaitingRequests
    ) -> None:
        self._classes = tuple(classes)
        self._keys = keys
        self._slots = places
        self._waiting_requests = waits

    def set_priority(self, request: Request, priority: int, step: int) -> bool:
        """As `Scheduler.reprioritise`; `step` is the next one to be formed."""
        after = class_of(priority, self._classes)
        is_apart = self._waiting_requests.tenant_limiter.is_held(request)
        if is_apart:
            self._waiting_requests.apply_limiter_changes(self._waiting_requests.tenant_limiter.remove(request))
        if request.request_class is after:
            self._move_within(request, priority, is_apart)
            return True
        return self._move_to(request, priority, after, step, is_apart)

    def _move_within(self, request: Request, priority: int, is_apart: bool) -> None:
        queue = self._waiting_requests.queue.queues[request.request_class.name]
        waits = request in queue
        with self._slots.reinserting(request):
            request.queue_key = self._keys.with_priority(request, priority)
        if is_apart:
            self._waiting_requests.enqueue(request)
        elif waits:
            queue.reorder(request)

    def _move_to(self, request: Request, priority: int, after: RequestClass, step: int, is_apart: bool) -> bool:
        queue, entered = (self._waiting_requests.queue.queues[each.name] for each in (request.request_class, after))
        waits, runs = request in queue, request.status is RUNNING
        if request.has_run:
            if not entered.can_be_bypassed or self._slots.is_at_limit(request, after):
                return False
            entered.record_bypass()
        num_waited = self._waiting_requests.monitor.num_steps_waited(request) if waits else 0
        if waits:
            queue.discard(request)
            if not self._waiting_requests.tenant_limiter.holds_slot(request):
                self._waiting_requests.apply_limiter_changes(self._waiting_requests.tenant_limiter.remove(request))
        with self._slots.reinserting(request):
            self._set_class(request, priority, after, step)
        if runs:
            request.class_change_step = step
        if waits or is_apart:
            self._waiting_requests.enqueue(request, num_waited)
        return True

    def _set_class(self, request: Request, priority: int, request_class: RequestClass, step: int) -> None:
        """It comes into the class now; its age goes with it."""
        clocks = self._waiting_requests.queue.clocks
        age = clocks[request.request_class.name] - request.arrival_clock
        request.priority, request.request_class = priority, request_class
        request.class_sequence = self._waiting_requests.num_arrivals
        request.arrival_clock = clocks[request_class.name] - age
        request.class_entry_step = step
        request.queue_key = self._keys.key_of(request)
