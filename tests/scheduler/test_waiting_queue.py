"""Which class is next: the highest that waits, and those that have aged by weight."""

from __future__ import annotations

from typing import Any

from factories import create_classes, create_request
from llm_serving.core.request import Request
from llm_serving.core.request_class import class_of
from llm_serving.scheduler.waiting_queue import WaitingQueue

CLASSES = ("high", "normal", "low")


class Arrivals:
    """A queue and its arrivals; requests are named after their class."""

    def __init__(self, ageing_steps: int = 10, max_overtakes: int = 0, **changes: Any) -> None:
        self.classes = create_classes(ageing_steps, **changes)
        self.queue = WaitingQueue(self.classes, max_overtakes)
        self._count = 0

    def push(self, name: str, step: int = 0) -> Request:
        self._count += 1
        request = create_request(priority=CLASSES.index(name) - 1)
        request.request_class = class_of(request.priority, self.classes)
        request.queue_key = (request.priority, step, self._count)
        self.queue.push(request, step)
        return request

    def pop(self, step: int, closed: set[str] | None = None) -> str | None:
        request = self.queue.best(step, closed or set())
        if request is None:
            return None
        self.queue.pop(request, step, closed or set())
        return request.request_class.name


def test_the_highest_class_goes_first_whatever_the_order_of_arrival() -> None:
    arrivals = Arrivals()
    for name in ("low", "normal", "high"):
        arrivals.push(name)
    assert [arrivals.pop(0) for _ in range(4)] == ["high", "normal", "low", None]


def test_within_a_class_the_first_to_come_goes_first() -> None:
    arrivals = Arrivals()
    first, second = arrivals.push("low"), arrivals.push("low")
    assert arrivals.queue.best(0, ()) is first
    arrivals.pop(0)
    assert arrivals.queue.best(0, ()) is second


def test_a_class_that_has_aged_shares_by_weight() -> None:
    arrivals = Arrivals(high={"weight": 3}, low={"weight": 1})
    for _ in range(20):
        arrivals.push("high")
        arrivals.push("low")
    assert [arrivals.pop(9) for _ in range(3)] == ["high"] * 3
    turns = [arrivals.pop(10) for _ in range(12)]
    assert [turns[start : start + 4].count("low") for start in (0, 4, 8)] == [1, 1, 1]


def test_waiting_saves_up_no_turns() -> None:
    arrivals = Arrivals(high={"weight": 1}, low={"weight": 1})
    for _ in range(30):
        arrivals.push("high")
    arrivals.push("low")
    assert [arrivals.pop(0) for _ in range(10)] == ["high"] * 10
    for _ in range(9):
        arrivals.push("low")
    turns = [arrivals.pop(10) for _ in range(8)]
    assert turns.count("low") == 4


def test_classes_at_their_limit_are_passed_over() -> None:
    arrivals = Arrivals()
    arrivals.push("high")
    arrivals.push("low")
    assert arrivals.pop(0, {"high"}) == "low"
    assert arrivals.pop(0, {"high"}) is None
    assert arrivals.pop(0) == "high"


def test_a_class_passed_over_saves_up_no_turns() -> None:
    arrivals = Arrivals(ageing_steps=0, high={"weight": 1}, low={"weight": 1})
    for _ in range(20):
        arrivals.push("high")
        arrivals.push("low")
    assert [arrivals.pop(0, {"high"}) for _ in range(8)] == ["low"] * 8
    assert [arrivals.pop(0) for _ in range(6)].count("high") == 3


def test_pop_tells_whether_a_higher_class_still_waits() -> None:
    arrivals = Arrivals(ageing_steps=0)
    high, low = arrivals.push("high"), arrivals.push("low")
    assert not arrivals.queue.pop(high, 0, ())
    arrivals.push("high")
    assert arrivals.queue.best(0, ()) is low
    assert arrivals.queue.pop(low, 0, ())
    low.request_id = "again"
    arrivals.queue.push(low, 0)
    assert not arrivals.queue.pop(low, 0, {"high"}), "a class at its limit does not wait for this place"


def test_iteration_and_length_cover_all_classes() -> None:
    arrivals = Arrivals()
    requests = [arrivals.push(name) for name in CLASSES]
    assert (len(arrivals.queue), {*arrivals.queue}) == (3, {*requests})
    arrivals.queue.discard(requests[1])
    assert {*arrivals.queue} == {requests[0], requests[2]}
