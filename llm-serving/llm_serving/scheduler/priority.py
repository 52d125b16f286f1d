"""Changes of a request's priority. Such a change may move a waiting or running request to a different class."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.scheduler.queues import QueueKeys
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.waiting import WaitingRequests


class PriorityChanger:
    """Changes the priority of requests. The wait bounds of all other requests still hold."""

    def __init__(
        self,
        classes: Sequence[RequestClass],
        keys: QueueKeys,
        slots: RunningSlots,
        waiting_requests: WaitingRequests,
    ) -> None:
        self._classes = tuple(classes)
        self._keys = keys
        self._slots = slots
        self._waiting_requests = waiting_requests

    def set_priority(self, request: Request, priority: int, step: int) -> bool:
        """See `Scheduler.set_priority`. `step`: number of the next step."""
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
        """Move the request to another class. The steps that it has waited count there too."""
        clocks = self._waiting_requests.queue.clocks
        age = clocks[request.request_class.name] - request.arrival_clock
        request.priority, request.request_class = priority, request_class
        request.class_sequence = self._waiting_requests.num_arrivals
        request.arrival_clock = clocks[request_class.name] - age
        request.class_entry_step = step
        request.queue_key = self._keys.key_of(request)
