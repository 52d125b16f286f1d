"""The admission queue: counts, limits and drain rates."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.admission.queue_limits import LIMITS, MIN_FINISHED, AdmissionQueue, DrainRate
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.request_class import STANDARD, RequestClass

HIGH = RequestClass(name="high", rank=-1)
LOW = RequestClass(name="low", rank=1, max_waiting=3)


def create_queue(max_waiting_queue: int = 5, max_waiting_tokens: int | None = None, **scheduler) -> AdmissionQueue:
    return AdmissionQueue(
        ServingConfig(
            scheduler=SchedulerConfig(
                max_waiting_queue=max_waiting_queue, max_waiting_tokens=max_waiting_tokens, **scheduler
            ),
            request_classes=(HIGH, LOW),
            api_keys=(ApiKey(name="a", key_sha256="0a" * 32, max_waiting=2),),
        )
    )


def first_exceeded(queue, num_requests, num_tokens, request_class, tenant):
    limits = queue.limits(num_requests, num_tokens, request_class, tenant)
    return next((limit for limit in limits if limit.is_exceeded), None)


def counts(queue, **which):
    load = queue.load(**which)
    return load.num_waiting, load.num_waiting_tokens, load.num_running


def test_queue_counts_a_request_as_waiting_then_running_then_not_at_all() -> None:
    queue = create_queue()
    queue.add("x", 0, HIGH, "a", 7)
    queue.add("y", 1, LOW, "", 5)
    assert counts(queue) == (2, 12, 0)
    queue.start(["x"])
    queue.start(["x"])
    assert counts(queue) == (1, 5, 1)
    assert counts(queue, replica=1) == (1, 5, 0)
    assert counts(queue, max_rank=-1) == (0, 0, 1)
    assert queue.num_unfinished_of("a") == 1
    for request_id in ("x", "y", "x"):
        queue.remove(request_id)
    queue.start(["y"])
    assert counts(queue) == (0, 0, 0)
    assert queue.num_unfinished_of("a") == 0


def test_queue_follows_changes_of_class_and_replica() -> None:
    queue = create_queue()
    queue.add("x", 0, HIGH, "", 7)
    queue.change_class("x", LOW)
    assert (queue.class_load("high").num_waiting, queue.class_load("low").num_waiting) == (0, 1)
    queue.start(["x"])
    queue.change_replica("x", 1)
    queue.change_class("x", HIGH)
    assert (queue.class_load("high").num_running, queue.class_load("low").num_running) == (1, 0)
    assert (queue.load(0).num_running, queue.load(1).num_running) == (0, 1)
    queue.remove("x")
    for change in (lambda: queue.change_class("x", LOW), lambda: queue.change_replica("x", 0)):
        change()
    assert counts(queue) == (0, 0, 0)


@pytest.mark.parametrize(
    ("waiting", "more", "limit", "text"),
    [
        ([(HIGH, "")] * 5, (HIGH, ""), "max_waiting_queue", "5 of 5 requests wait in the queue"),
        ([(LOW, "")] * 3, (LOW, ""), "class_max_waiting", "3 of 3 requests of class low wait in the queue"),
        ([(HIGH, "a")] * 2, (LOW, "a"), "key_max_waiting", "2 of 2 requests of a wait in the queue"),
        ([(HIGH, ""), (LOW, "a")], (HIGH, "a"), None, None),
    ],
)
def test_queue_names_the_exceeded_limit_with_its_numbers(waiting, more, limit, text) -> None:
    queue = create_queue()
    for index, each in enumerate(waiting):
        queue.add(str(index), index % 2, *each, 4)
    found = first_exceeded(queue, 1, 4, *more)
    if limit is None:
        assert found is None
        return
    assert limit in LIMITS
    assert found.name == limit
    assert found.refusal.startswith(text) and found.refusal.endswith("; 1 needed")
    queue.start(["0"])
    assert first_exceeded(queue, 1, 4, *more) is None


def test_queue_limits_waiting_prompt_tokens() -> None:
    queue = create_queue(max_waiting_tokens=100)
    queue.add("x", 0, HIGH, "", 40)
    queue.add("y", 0, HIGH, "", 50)
    assert first_exceeded(queue, 2, 10, HIGH, "") is None
    found = first_exceeded(queue, 1, 11, HIGH, "")
    assert found.name == "max_waiting_tokens"
    assert found.refusal == (
        "90 of 100 prompt tokens wait in the queue (scheduler_config.max_waiting_tokens); 11 needed"
    )


def test_queue_charges_a_group_at_once() -> None:
    queue = create_queue()
    queue.add("x", 0, HIGH, "", 4)
    assert first_exceeded(queue, 4, 16, HIGH, "") is None
    assert first_exceeded(queue, 5, 20, HIGH, "") is not None


def test_queue_refuses_without_retry_a_request_that_exceeds_an_empty_queue() -> None:
    queue = create_queue(max_waiting_tokens=100)

    def never_fits(*group: Any) -> list[str]:
        return [str(each.never_fits) for each in queue.limits(*group) if each.amount > each.limit]

    assert never_fits(3, 100, LOW, "") == []
    [error] = never_fits(4, 4, LOW, "")
    rule = "must ask for at most 3 answers or texts at once, as many as the queue holds"
    assert error == f"`n` {rule} (request_classes.low.max_waiting). Given: 4"
    [error] = never_fits(3, 4, HIGH, "a")
    assert "at most 2 answers or texts at once, as many as the queue holds (api_keys.a.max_waiting)" in error
    [error] = never_fits(1, 101, HIGH, "")
    assert "at most 100 tokens, counted once for each requested answer (scheduler_config.max_waiting_tokens)" in error


def test_cached_prompt_tokens_count_as_waiting_and_delay_no_request() -> None:
    queue = AdmissionQueue(ServingConfig())
    queue.add("0", 0, STANDARD, "", 20, num_cached_tokens=16)
    queue.add("1", 0, STANDARD, "", 20)
    assert queue.waiting_ahead(0, None) == (2, 24)
    assert (queue.load().num_waiting_tokens, queue.load().num_uncached_tokens) == (40, 24)
    queue.start(["0"])
    assert (queue.load().num_waiting_tokens, queue.load().num_uncached_tokens) == (20, 20)


def test_requests_beyond_their_tenants_concurrency_limit_are_not_ahead_of_other_tenants() -> None:
    queue = create_queue(max_waiting_queue=9, max_running_per_tenant=1)
    for number in range(4):
        queue.add(str(number), 0, HIGH, "x", 10)
    queue.add("5", 0, LOW, "y", 10)
    assert queue.waiting_ahead(0, None) == (2, 20)
    assert queue.waiting_ahead(0, -1) == (1, 10)
    queue.start(["0"])
    assert queue.waiting_ahead(0, None) == (1, 10)
    assert queue.waiting_ahead(1, None) == (0, 0)


def test_drain_rate_counts_only_time_in_which_requests_wait() -> None:
    rate, now = DrainRate(), 0.0
    for _ in range(3 * MIN_FINISHED):
        rate.update(now, True)
        now += 0.5
        rate.record_finished(now)
        rate.update(now, False)
        now += 10.0
        rate.record_finished(now)
    assert rate.per_second(now) == pytest.approx(2.0)


def test_drain_rate_is_unknown_before_enough_requests_have_finished() -> None:
    rate = DrainRate()
    rate.update(0.0, True)
    for number in range(MIN_FINISHED - 1):
        rate.record_finished(number + 1.0)
    assert rate.per_second(MIN_FINISHED) is None


def test_drain_rate_falls_while_no_request_finishes() -> None:
    rate = DrainRate()
    rate.update(0.0, True)
    for number in range(100):
        rate.record_finished(number + 1.0)
    before, later = rate.per_second(100.0), rate.per_second(1000.0)
    assert before is not None and later is not None and later < before / 5


def test_drain_rate_forgets_old_requests() -> None:
    rate, now = DrainRate(), 0.0
    rate.update(now, True)
    for seconds in [1.0] * 1000 + [0.1] * 5000:
        now += seconds
        rate.record_finished(now)
    assert rate.per_second(now) == pytest.approx(10.0, rel=0.01)


def test_waiting_requests_of_a_tenant_count_in_the_queues_of_all_models() -> None:
    queue, other = create_queue(), create_queue()
    queue.share_tenants(other)
    queue.add("first", 0, HIGH, "a", 1)
    other.add("second", 0, HIGH, "a", 1)
    for each in (queue, other):
        exceeded = first_exceeded(each, 1, 1, HIGH, "a")
        assert (exceeded.name, exceeded.used) == ("key_max_waiting", 2)
        assert first_exceeded(each, 1, 1, HIGH, "b") is None
    queue.remove("first")
    assert first_exceeded(other, 1, 1, HIGH, "a") is None
