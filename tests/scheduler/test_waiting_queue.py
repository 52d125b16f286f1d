"""The next class: the highest that waits, and aged classes by weight."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from llm_serving.core.request import Request
from llm_serving.core.request_class import class_of
from llm_serving.scheduler import SchedulerLimits
from llm_serving.scheduler.policies import ArrivalOrder
from llm_serving.scheduler.queues import WaitingQueue
from support.factories import create_classes, create_request

CLASSES = ("high", "normal", "low")
NO_BLOCKS = dict.fromkeys(CLASSES, 0)


class Arrivals:
    """A queue and its arrivals; requests are named after their class."""

    def __init__(self, ageing_steps: int = 10, **changes: Any) -> None:
        self.classes = create_classes(ageing_steps, **changes)
        limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=7, max_prefill_seqs=7, max_model_len=64)
        self.queue = WaitingQueue(self.classes, limits, ArrivalOrder(), 64)
        self.held = dict.fromkeys(CLASSES, 0)
        self._count = 0

    def push(self, name: str) -> Request:
        self._count += 1
        request = create_request(priority=CLASSES.index(name) - 1)
        request.request_class = class_of(request.priority, self.classes)
        request.sequence = self._count
        request.queue_key = (request.priority, 0.0, self.queue.clocks[name], self._count)
        request.arrival_clock = self.queue.clocks[name]
        self.queue.queues[name].push(request)
        return request

    def pop(self, closed: Collection[str] = ()) -> str | None:
        """Admit the next request, and return its class."""
        request = self.queue.peek(closed, self.held, NO_BLOCKS)
        if request is None:
            return None
        name = request.request_class.name
        self.queue.queues[name].pop(request)
        self.held[name] += 1
        return name

    def tick(self, num_steps: int, closed: Collection[str] = ()) -> None:
        for _ in range(num_steps):
            waiting = self.queue.update_contenders(closed, self.held)
            self.queue.sharing.charge(self.held, {}, NO_BLOCKS, waiting, ())
            self.queue.tick(closed)


def test_highest_class_goes_first_for_any_arrival_order() -> None:
    arrivals = Arrivals()
    for name in ("low", "normal", "high"):
        arrivals.push(name)
    assert [arrivals.pop() for _ in range(4)] == ["high", "normal", "low", None]


def test_class_is_served_by_arrival() -> None:
    arrivals = Arrivals()
    first, second = arrivals.push("low"), arrivals.push("low")
    assert arrivals.queue.peek((), arrivals.held, NO_BLOCKS) is first
    arrivals.pop()
    assert arrivals.queue.peek((), arrivals.held, NO_BLOCKS) is second


def test_aged_class_gets_slots_by_weight() -> None:
    arrivals = Arrivals(high={"weight": 6}, low={"weight": 1})
    for _ in range(20):
        arrivals.push("high")
        arrivals.push("low")
    arrivals.tick(9)
    assert arrivals.queue.peek((), arrivals.held, NO_BLOCKS).request_class.name == "high"  # type: ignore[union-attr]
    arrivals.tick(1)
    admitted = [arrivals.pop() for _ in range(7)]
    assert (admitted.count("high"), admitted.count("low")) == (6, 1)


def test_age_of_a_class_counts_from_the_arrival_of_its_oldest_request() -> None:
    arrivals = Arrivals()
    arrivals.push("low")
    second = arrivals.push("low")
    arrivals.tick(10)
    arrivals.pop()
    arrivals.held["low"] = 0
    arrivals.push("high")
    arrivals.queue.sharing.charge({"high": 7, "normal": 0, "low": 0}, {}, NO_BLOCKS, CLASSES, ())
    arrivals.held["high"] = 6
    assert arrivals.queue.peek((), arrivals.held, NO_BLOCKS) is second


def test_classes_at_their_share_limit_are_skipped_and_do_not_age() -> None:
    arrivals = Arrivals()
    arrivals.push("high")
    arrivals.push("low")
    assert arrivals.pop({"high"}) == "low"
    assert arrivals.pop({"high"}) is None
    arrivals.tick(5, {"high"})
    assert arrivals.queue.clocks == {"high": 0, "normal": 5, "low": 5}
    assert arrivals.pop() == "high"


def test_iteration_and_length_cover_all_classes() -> None:
    arrivals = Arrivals()
    requests = [arrivals.push(name) for name in CLASSES]
    assert (len(arrivals.queue), {*arrivals.queue}) == (3, {*requests})
    arrivals.queue.discard(requests[1])
    assert {*arrivals.queue} == {requests[0], requests[2]}
