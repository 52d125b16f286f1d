"""Another priority for a request that is on its way, and with it perhaps another class."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.scheduler.queues import QueueKeys
from llm_serving.scheduler.running import Places
from llm_serving.scheduler.waiting import Waits


class Reprioritiser:
    """Moves requests within and between classes, so that nobody who waits is promised less for it."""

    def __init__(self, classes: Sequence[RequestClass], keys: QueueKeys, places: Places, waits: Waits) -> None:
        self._classes = tuple(classes)
        self._keys = keys
        self._places = places
        self._waits = waits

    def move(self, request: Request, priority: int, step: int) -> bool:
        """As `Scheduler.reprioritise`; `step` is the next one to be formed."""
        after = class_of(priority, self._classes)
        is_apart = self._waits.gate.holds(request)
        if is_apart:
            self._waits.follow(self._waits.gate.left(request))
        if request.request_class is after:
            self._move_within(request, priority, is_apart)
            return True
        return self._move_to(request, priority, after, step, is_apart)

    def _move_within(self, request: Request, priority: int, is_apart: bool) -> None:
        queue = self._waits.queue.queues[request.request_class.name]
        waits = request in queue
        with self._places.changing(request):
            request.queue_key = self._keys.with_priority(request, priority)
        if is_apart:
            self._waits.wait(request)
        elif waits:
            queue.reorder(request)

    def _move_to(self, request: Request, priority: int, after: RequestClass, step: int, is_apart: bool) -> bool:
        queue, entered = (self._waits.queue.queues[each.name] for each in (request.request_class, after))
        waits, runs = request in queue, request.status is RUNNING
        if request.has_run:
            if not entered.may_be_overtaken or self._places.is_at_limit(request, after):
                return False
            entered.overtake()
        num_waited = self._waits.monitor.num_waited(request) if waits else 0
        if waits:
            queue.discard(request)
            if not self._waits.gate.counts(request):
                self._waits.follow(self._waits.gate.left(request))
        with self._places.changing(request):
            self._set_class(request, priority, after, step)
        if runs:
            request.moved_at_step = step
        if waits or is_apart:
            self._waits.wait(request, num_waited)
        return True

    def _set_class(self, request: Request, priority: int, request_class: RequestClass, step: int) -> None:
        """It comes into the class now; its age goes with it."""
        clocks = self._waits.queue.clocks
        age = clocks[request.request_class.name] - request.arrival_clock
        request.priority, request.request_class = priority, request_class
        request.entered = self._waits.num_entered
        request.arrival_clock = clocks[request_class.name] - age
        request.entered_at_step = step
        request.queue_key = self._keys.of(request)
