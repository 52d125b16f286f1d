"""The key of a request: its place among all others, waiting or running."""

from __future__ import annotations

from llm_serving.core.request import Request
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.orders import Order
from llm_serving.scheduler.policy import Policy

Key = tuple[int, float, int, int]
"""Rank of the class, place by the order, step of arrival moved by the priority, sequence."""


class QueueKeys:
    """By class, then by the order, then by arrival, which a priority moves within its class."""

    def __init__(self, policy: Policy, order: Order, limits: SchedulerLimits) -> None:
        self._honours_classes = policy.honours_classes
        self._order = order
        self._max_head_start = limits.max_head_start_steps

    def of(self, request: Request) -> Key:
        """Of a request that is in its class."""
        rank = request.request_class.rank
        if not self._honours_classes:
            return rank, 0.0, 0, request.sequence
        step = request.entered_at_step + self._head_start(request)
        return rank, self._order.place(request), step, request.sequence

    def with_priority(self, request: Request, priority: int) -> Key:
        """Of the request had it come to its class with this priority; it has it from now on."""
        rank, place, step, sequence = request.queue_key
        step -= self._head_start(request)
        request.priority = priority
        return rank, place, step + self._head_start(request), sequence

    def _head_start(self, request: Request) -> int:
        """Steps by which its priority moves it within its class; negative ones forward."""
        if not self._honours_classes:
            return 0
        head_start = (request.priority - request.request_class.rank) * request.request_class.ageing_steps
        return max(-self._max_head_start, min(self._max_head_start, head_start))
