"""The order within a class: who has run before, then the key, then tenants by service, within the cap on overtaking."""

from __future__ import annotations

from factories import create_classes, create_request
from llm_serving.core.request import Request
from llm_serving.scheduler.class_queue import ClassQueue


def create_queue(max_overtakes: int = 0) -> ClassQueue:
    return ClassQueue(create_classes()[1], max_overtakes)


def waiting(name: str, key: int, tenant: str = "") -> Request:
    request = create_request(request_id=name, tenant=tenant)
    request.queue_key = (0, key, key)
    return request


def pop_all(queue: ClassQueue, cost: int = 0) -> list[str]:
    """Empties the queue from its head; each request is charged `cost` when it goes."""
    names = []
    while (request := queue.head()) is not None:
        queue.pop(request)
        queue.shares.charge(request.tenant, cost)
        names.append(request.request_id)
    return names


def test_requests_go_by_their_key() -> None:
    queue = create_queue()
    for name, key in (("b", 2), ("c", 3), ("a", 1)):
        queue.push(waiting(name, key))
    assert len(queue) == 3
    assert pop_all(queue) == ["a", "b", "c"]


def test_who_has_run_before_goes_first() -> None:
    queue = create_queue()
    queue.push(waiting("new", 1))
    for name, key in (("later", 9), ("earlier", 5)):
        request = waiting(name, key)
        request.last_scheduled_step = 3
        queue.push(request)
    assert queue.oldest() is queue.head()
    assert pop_all(queue) == ["earlier", "later", "new"]


def test_discarded_requests_are_passed_over() -> None:
    queue = create_queue(max_overtakes=1)
    requests = [waiting(name, key, tenant) for key, (name, tenant) in enumerate(["ax", "bx", "cy"])]
    for request in requests:
        queue.push(request)
    queue.discard(requests[0])
    queue.discard(requests[0])
    assert {request.request_id for request in queue} == {"b", "c"}
    assert pop_all(queue) == ["b", "c"]
    assert queue.head() is queue.oldest() is None


def test_a_request_may_come_back_under_another_key() -> None:
    queue = create_queue()
    request, other = waiting("a", 1), waiting("b", 2)
    for each in (request, other):
        queue.push(each)
    queue.discard(request)
    request.queue_key = (0, 3, 3)
    queue.push(request)
    assert pop_all(queue) == ["b", "a"]


def test_tenants_take_turns() -> None:
    queue = create_queue(max_overtakes=10)
    for key in range(3):
        queue.push(waiting(f"x{key}", key, "x"))
    for key in range(3, 6):
        queue.push(waiting(f"y{key}", key, "y"))
    assert pop_all(queue, cost=10) == ["x0", "y3", "x1", "y4", "x2", "y5"]


def test_the_first_is_overtaken_max_overtakes_times_and_no_more() -> None:
    queue = create_queue(max_overtakes=2)
    queue.push(waiting("heavy", 0, "x"))
    for key in range(1, 5):
        queue.push(waiting(f"y{key}", key, "y"))
    queue.shares.charge("x", 1000)
    assert pop_all(queue, cost=1) == ["y1", "y2", "heavy", "y3", "y4"]


def test_each_first_has_its_own_count_of_overtakes() -> None:
    queue = create_queue(max_overtakes=1)
    for key in range(2):
        queue.push(waiting(f"x{key}", key, "x"))
    for key in range(2, 5):
        queue.push(waiting(f"y{key}", key, "y"))
    queue.shares.charge("x", 1000)
    assert pop_all(queue, cost=1) == ["y2", "x0", "y3", "x1", "y4"]


def test_without_overtaking_tenants_do_not_matter() -> None:
    queue = create_queue()
    queue.shares.charge("x", 1000)
    queue.push(waiting("a", 0, "x"))
    queue.push(waiting("b", 1, "y"))
    assert pop_all(queue) == ["a", "b"]


def test_a_tenant_that_always_waits_leaves_nothing_behind_for_those_who_went() -> None:
    queue = create_queue(max_overtakes=1)
    for key in range(500):
        queue.push(waiting(f"a{key}", key, "x"))
        queue.push(waiting(f"b{key}", key, "y"))
        for _ in range(2 if key else 1):
            request = queue.head()
            assert request is not None
            queue.pop(request)
            queue.shares.charge(request.tenant, 3)
    assert len(queue) == 1
    assert len(queue._tenants) <= 4
