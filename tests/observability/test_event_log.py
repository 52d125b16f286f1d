"""What the event log keeps, and for how long."""

from __future__ import annotations

import math

from llm_serving.core.request_class import STANDARD
from llm_serving.core.timings import HttpTimings
from llm_serving.observability.event_log import EventLog, Outage
from support.engine_harness import Harness
from support.factories import create_request


def log_of(harness: Harness) -> EventLog:
    return harness.engine.event_log


def test_disabled_event_log_keeps_nothing():
    harness = Harness()
    harness.engine.submit(create_request())
    harness.run()
    events = log_of(harness).snapshot(100.0)
    assert (log_of(harness).records(), events.steps, events.decisions) == ([], [], [])


def test_event_log_separates_prompt_rows_from_decode_rows():
    harness = Harness(ahead=False, event_log=EventLog(10, 100))
    first, second = create_request(4, max_tokens=3), create_request(1, max_tokens=2)
    harness.engine.submit(first)
    harness.engine.submit(second)
    harness.run()
    assert [
        (step.number, step.singles, step.chunks, step.num_tokens) for step in log_of(harness).snapshot(0.0).steps
    ] == [
        (0, (1,), ((0, 0, 4),), 5),
        (1, (0, 1), (), 2),
        (2, (0,), (), 1),
    ]


def test_event_log_shares_one_tuple_for_an_unchanged_batch():
    harness = Harness(event_log=EventLog(10, 100))
    for _ in range(3):
        harness.engine.submit(create_request(max_tokens=6))
    harness.run()
    steps = log_of(harness).snapshot(0.0).steps
    assert len({id(step.singles) for step in steps[1:]}) == 1


def test_event_log_keeps_the_newest_requests_and_steps():
    harness = Harness(event_log=EventLog(2, 5))
    requests = [create_request(max_tokens=3) for _ in range(4)]
    for request in requests:
        harness.engine.submit(request)
        harness.run()
    event_log = log_of(harness)
    assert [each.request_id for each in event_log.records()] == [request.request_id for request in requests[2:]]
    events = event_log.snapshot(1e6)
    assert [step.number for step in events.steps] == [7, 8, 9, 10, 11]
    assert events.kept_since == events.steps[0].formed


def test_ended_record_keeps_no_tokens():
    harness = Harness(event_log=EventLog(2, 5))
    request = create_request(6, max_tokens=3)
    harness.engine.submit(request)
    [record] = log_of(harness).records()
    assert record.summary.status == "waiting"
    harness.run()
    assert record._request is None
    assert record.summary[:5] == ("finished", "length", 6, 0, 3)


def test_event_log_forgets_a_request_that_was_not_accepted():
    event_log, request = EventLog(2, 5), create_request()
    request.http_timings = HttpTimings(0.0)
    event_log.submitted(request, request.request_class)
    assert request.http_timings.unfinished_request_ids == {request.request_id}
    event_log.forget(request)
    assert (event_log.records(), request.http_timings.unfinished_request_ids) == ([], set())


def test_outage_begins_with_the_oldest_lost_step():
    harness = Harness(event_log=EventLog(2, 5))
    harness.engine.submit(create_request())
    harness.engine._inbox.handle()
    schedule = harness.scheduler.schedule(3.0)
    assert schedule is not None
    event_log = log_of(harness)
    event_log.on_submitted(schedule, 3.0)
    event_log.on_failed(5.0)
    assert event_log.snapshot(6.0).outages == [Outage(3.0, math.inf)]
    assert event_log.snapshot(6.0).steps == []
    event_log.recovered(8.0)
    event_log.on_failed(9.0)
    event_log.recovered(9.5)
    assert event_log.snapshot(6.0).outages == [Outage(3.0, 8.0), Outage(9.0, 9.5)]


def test_event_log_keeps_decisions_that_differ():
    event_log = EventLog(2, 5)
    harness = Harness(max_num_seqs=1, event_log=event_log)
    for number in range(3):
        harness.engine.submit(create_request(max_tokens=4, request_id=f"request-{number}"))
    harness.run()
    blocked = [decision.blocked for decision in event_log.snapshot(0.0).decisions]
    assert [None if each is None else (each.request_id, each.reason) for each in blocked] == [
        ("request-1", "no free slot"),
        ("request-2", "no free slot"),
        None,
    ]


def test_event_log_keeps_a_request_that_migrated_away_and_back():
    event_log = EventLog(2, 5)
    moving, *others = (create_request() for _ in range(4))
    for each in (moving, *others):
        event_log.submitted(each, STANDARD)
    event_log.departed(moving, 1.0)
    event_log.arrived(moving, STANDARD, 1.0)
    for time, each in enumerate(others, start=2):
        event_log.ended(each, float(time))
    assert moving.request_id in {each.request_id for each in event_log.records()}
    event_log.ended(moving, 9.0)
    assert [each.request_id for each in event_log.ended_since(3.5, 10)] == [others[-1].request_id, moving.request_id]
    assert len(event_log.records()) == 2
