"""The queue of a class: requests that ran before, then keys, then tenants by service, within the limit on bypasses."""

from __future__ import annotations

import pytest
from llm_serving.core.request import Request
from llm_serving.scheduler.policies import ORDERS
from llm_serving.scheduler.queues import ClassQueue
from support.factories import create_classes, create_request


def create_queue(max_overtakes: int = 16, order: str = "fair") -> ClassQueue:
    return ClassQueue(create_classes()[1], max_overtakes, ORDERS[order]())


def waiting(name: str, key: int, tenant: str = "", sequence: int | None = None) -> Request:
    """Return a request with the sort key `key` and the arrival number `sequence`, by default the same."""
    request = create_request(request_id=name, tenant=tenant)
    request.sequence = key if sequence is None else sequence
    request.queue_key = (0, key, 0, request.sequence)
    return request


def pop_all(queue: ClassQueue, cost: int = 0) -> list[str]:
    """Pop all requests, and charge `cost` for each."""
    names = []
    while (request := queue.peek()) is not None:
        queue.pop(request)
        queue.token_counters.charge(request.tenant, cost)
        names.append(request.request_id)
    return names


def test_class_queue_orders_requests_by_key() -> None:
    queue = create_queue()
    for name, key in (("b", 2), ("c", 3), ("a", 1)):
        queue.push(waiting(name, key))
    assert len(queue) == 3
    assert pop_all(queue) == ["a", "b", "c"]


def test_class_queue_puts_requests_that_ran_before_first() -> None:
    queue = create_queue()
    queue.push(waiting("new", 1))
    for name, key in (("later", 9), ("earlier", 5)):
        request = waiting(name, key)
        request.last_scheduled_step = 3
        queue.push(request)
    assert pop_all(queue) == ["earlier", "later", "new"]


def test_class_queue_skips_discarded_requests() -> None:
    queue = create_queue(max_overtakes=1)
    requests = [waiting(name, key, tenant) for key, (name, tenant) in enumerate(["ax", "bx", "cy"])]
    for request in requests:
        queue.push(request)
    queue.discard(requests[0])
    queue.discard(requests[0])
    assert {request.request_id for request in queue} == {"b", "c"}
    assert pop_all(queue) == ["b", "c"]
    assert queue.peek() is None
    assert queue.arrival_clock() is None


def test_class_queue_accepts_a_request_again_under_another_key() -> None:
    queue = create_queue()
    request, other = waiting("a", 1), waiting("b", 2)
    for each in (request, other):
        queue.push(each)
    queue.discard(request)
    request.queue_key = (0, 3, 0, 3)
    queue.push(request)
    assert pop_all(queue) == ["b", "a"]


def test_class_queue_alternates_between_tenants() -> None:
    queue = create_queue(max_overtakes=10)
    for key in range(3):
        queue.push(waiting(f"x{key}", key, "x"))
    for key in range(3, 6):
        queue.push(waiting(f"y{key}", key, "y"))
    assert pop_all(queue, cost=10) == ["x0", "y3", "x1", "y4", "x2", "y5"]


def test_oldest_request_is_bypassed_at_most_max_overtakes_times() -> None:
    queue = create_queue(max_overtakes=2)
    queue.push(waiting("heavy", 0, "x"))
    for key in range(1, 5):
        queue.push(waiting(f"y{key}", key, "y"))
    queue.token_counters.charge("x", 1000)
    assert pop_all(queue, cost=1) == ["y1", "y2", "heavy", "y3", "y4"]


def test_bypasses_are_counted_for_each_oldest_request() -> None:
    queue = create_queue(max_overtakes=1)
    for key in range(2):
        queue.push(waiting(f"x{key}", key, "x"))
    for key in range(2, 5):
        queue.push(waiting(f"y{key}", key, "y"))
    queue.token_counters.charge("x", 1000)
    assert pop_all(queue, cost=1) == ["y2", "x0", "y3", "x1", "y4"]


def test_class_queue_without_fair_sharing_ignores_tenants() -> None:
    queue = create_queue(order="arrival")
    queue.token_counters.charge("x", 1000)
    queue.push(waiting("a", 0, "x"))
    queue.push(waiting("b", 1, "y"))
    assert pop_all(queue) == ["a", "b"]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_oldest_request_is_one_of_max_overtakes_plus_one_under_any_keys(order: str) -> None:
    """Later requests have ever better keys, as if clients chose the worst priorities."""
    queue = create_queue(max_overtakes=2, order=order)
    for sequence in range(6):
        queue.push(waiting(f"r{sequence}", -sequence, sequence=sequence))
    assert pop_all(queue) == ["r5", "r4", "r0", "r3", "r2", "r1"]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_class_queue_without_bypasses_is_ordered_by_arrival(order: str) -> None:
    queue = create_queue(max_overtakes=0, order=order)
    for sequence in range(4):
        queue.push(waiting(f"r{sequence}", -sequence, tenant=str(sequence % 2), sequence=sequence))
    assert pop_all(queue, cost=5) == ["r0", "r1", "r2", "r3"]


def test_class_queue_returns_the_arrival_of_the_longest_wait() -> None:
    queue = create_queue()
    assert queue.arrival_clock() is None
    for name, clock, has_run in (("new", 7, False), ("newer", 9, False), ("back", 8, True)):
        request = waiting(name, clock)
        request.arrival_clock = clock
        request.last_scheduled_step = 3 if has_run else -1
        queue.push(request)
    assert queue.arrival_clock() == 7


def test_class_queue_drops_entries_of_tenants_without_requests() -> None:
    queue = create_queue(max_overtakes=1)
    for key in range(500):
        queue.push(waiting(f"a{key}", key, "x"))
        queue.push(waiting(f"b{key}", key, "y"))
        for _ in range(2 if key else 1):
            request = queue.peek()
            assert request is not None
            queue.pop(request)
            queue.token_counters.charge(request.tenant, 3)
    assert len(queue) == 1
    assert len(queue._tenants) <= 4
