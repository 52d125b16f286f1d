"""Which request of a class is admitted next, by each order."""

from __future__ import annotations

import pytest
from llm_serving.core.request import Request, RequestStatus
from llm_serving.core.request_class import DEFAULT_CLASSES, RequestClass
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler.policies import ORDERS, DeadlineOrder, ShortestOrder
from support.factories import create_classes, create_request, create_scheduler, run_step


def admitted(scheduler: Scheduler, *requests: Request) -> list[str]:
    """Return the order in which simultaneous requests get the only slot."""
    for request in requests:
        scheduler.add(request)
    order: list[str] = []
    while len(order) < len(requests):
        assert run_step(scheduler) is not None
        for request in requests:
            if request.status is not RequestStatus.WAITING and request.request_id not in order:
                order.append(request.request_id)
    return order


def create(order: str, **options: int) -> Scheduler:
    return create_scheduler(
        order=order, max_num_seqs=1, classes=create_classes()[1:2], **{"max_overtakes": 16, **options}
    )


def named(name: str, priority: int = 0, **options: object) -> Request:
    return create_request(4, request_id=name, priority=priority, **options)  # type: ignore[arg-type]


def test_arrival_order_limits_the_shift_by_priority() -> None:
    for most, expected in ((1000, ["high", "first", "low"]), (0, ["first", "low", "high"])):
        scheduler = create("arrival", max_head_start_steps=most)
        first, low, high = named("first", 3), named("low", 5), named("high", 1)
        assert admitted(scheduler, first, low, high) == expected


def test_priority_boost_is_limited_to_max_head_start_steps() -> None:
    scheduler = create("arrival", max_head_start_steps=5)
    running, patient = named("running", max_tokens=30), named("patient", 9, max_tokens=1)
    for request in (running, patient):
        scheduler.add(request)
        run_step(scheduler)
    for _ in range(11):
        run_step(scheduler)
    late = named("late", 0, max_tokens=1)
    assert admitted(scheduler, late) == ["late"]
    assert patient.is_finished, "a request that arrived later than the boost goes behind"


def test_shortest_order_uses_max_tokens() -> None:
    requests = [named(f"{length}", max_tokens=length) for length in (9, 2, 5)]
    assert admitted(create("shortest"), *requests) == ["2", "5", "9"]


def test_shortest_order_predicts_length_from_the_tenant() -> None:
    scheduler = create("shortest")
    assert admitted(scheduler, named("done", max_tokens=20, tenant="brief", stop_token_ids=frozenset({7}))) == ["done"]
    while scheduler.has_unfinished_requests:
        run_step(scheduler)
    requests = [named("unknown", max_tokens=9), named("brief", max_tokens=30, tenant="brief")]
    assert admitted(scheduler, *requests) == ["brief", "unknown"]


def test_predicted_length_is_at_most_max_tokens() -> None:
    order = ShortestOrder()
    long = named("long", max_tokens=50)
    long.output_token_ids = [1] * 50
    order.record_finished(long)
    assert order.sort_key(named("short", max_tokens=3)) < order.sort_key(named("other", max_tokens=4))


def test_number_of_predicted_lengths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_serving.scheduler.policies.MAX_TENANTS", 3)
    order = ShortestOrder()
    for number in range(10):
        request = named("any", tenant=str(number))
        request.output_token_ids = [1]
        order.record_finished(request)
    assert len(order._mean_lengths) == 3


def test_deadline_order_uses_deadlines_and_class_slos() -> None:
    late, early, none = named("late"), named("early"), named("none")
    late.deadline, early.deadline = 9.0, 3.0
    assert admitted(create("deadline"), late, none, early) == ["early", "late", "none"]
    with_slo, without_slo = named("with slo"), named("without slo")
    with_slo.request_class, without_slo.request_class = DEFAULT_CLASSES[0], RequestClass(name="none", rank=0)
    assert DeadlineOrder().sort_key(with_slo) < DeadlineOrder().sort_key(without_slo)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_every_order_admits_the_oldest_request_eventually(order: str) -> None:
    """Each of the later ones is shorter, has an earlier deadline and a better priority."""
    scheduler = create(order, max_overtakes=2, max_head_start_steps=10**6)
    oldest = named("oldest", 50, max_tokens=20)
    oldest.deadline = 1000.0
    rivals = [named(f"{number}", 40 - number, max_tokens=19 - number, tenant=str(number)) for number in range(6)]
    for number, rival in enumerate(rivals):
        rival.deadline = 900.0 - number
    assert admitted(scheduler, oldest, *rivals).index("oldest") <= 2
