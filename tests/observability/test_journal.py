"""What a journal keeps, and for how long."""

from __future__ import annotations

import math

from llm_serving.core.request_class import STANDARD
from llm_serving.core.timings import HttpTimings
from llm_serving.observability.event_log import EventLog, Outage
from support.engine_harness import Harness
from support.factories import create_request


def journal_of(harness: Harness) -> EventLog:
    return harness.engine.journal


def test_a_journal_that_is_off_keeps_nothing():
    harness = Harness()
    harness.engine.submit(create_request())
    harness.run()
    record = journal_of(harness).record(100.0)
    assert (journal_of(harness).lives(), record.steps, record.decisions) == ([], [], [])


def test_steps_tell_prompts_from_single_tokens():
    harness = Harness(ahead=False, journal=EventLog(10, 100))
    first, second = create_request(4, max_tokens=3), create_request(1, max_tokens=2)
    harness.engine.submit(first)
    harness.engine.submit(second)
    harness.run()
    assert [
        (step.number, step.singles, step.chunks, step.num_tokens) for step in journal_of(harness).record(0.0).steps
    ] == [
        (0, (1,), ((0, 0, 4),), 5),
        (1, (0, 1), (), 2),
        (2, (0,), (), 1),
    ]


def test_steps_of_an_unchanged_batch_share_one_tuple():
    harness = Harness(journal=EventLog(10, 100))
    for _ in range(3):
        harness.engine.submit(create_request(max_tokens=6))
    harness.run()
    steps = journal_of(harness).record(0.0).steps
    assert len({id(step.singles) for step in steps[1:]}) == 1


def test_only_the_newest_requests_and_steps_are_kept():
    harness = Harness(journal=EventLog(2, 5))
    requests = [create_request(max_tokens=3) for _ in range(4)]
    for request in requests:
        harness.engine.submit(request)
        harness.run()
    journal = journal_of(harness)
    assert [life.request_id for life in journal.lives()] == [request.request_id for request in requests[2:]]
    record = journal.record(1e6)
    assert [step.number for step in record.steps] == [7, 8, 9, 10, 11]
    assert record.kept_since == record.steps[0].formed


def test_an_ended_request_leaves_its_tokens():
    harness = Harness(journal=EventLog(2, 5))
    request = create_request(6, max_tokens=3)
    harness.engine.submit(request)
    [life] = journal_of(harness).lives()
    assert life.facts.status == "waiting"
    harness.run()
    assert life._request is None
    assert life.facts[:5] == ("finished", "length", 6, 0, 3)


def test_a_request_that_was_not_taken_is_forgotten():
    journal, request = EventLog(2, 5), create_request()
    request.http_timings = HttpTimings(0.0)
    journal.submitted(request, request.request_class)
    assert request.http_timings.unfinished_request_ids == {request.request_id}
    journal.forget(request)
    assert (journal.lives(), request.http_timings.unfinished_request_ids) == ([], set())


def test_an_outage_begins_with_the_oldest_step_that_is_lost():
    harness = Harness(journal=EventLog(2, 5))
    harness.engine.submit(create_request())
    harness.engine._inbox.take()
    schedule = harness.scheduler.schedule(3.0)
    assert schedule is not None
    journal = journal_of(harness)
    journal.formed(3.0, schedule)
    journal.lost(5.0)
    assert journal.record(6.0).outages == [Outage(3.0, math.inf)]
    assert journal.record(6.0).steps == []
    journal.recovered(8.0)
    journal.lost(9.0)
    journal.recovered(9.5)
    assert journal.record(6.0).outages == [Outage(3.0, 8.0), Outage(9.0, 9.5)]


def test_decisions_are_kept_where_they_change():
    journal = EventLog(2, 5)
    harness = Harness(max_num_seqs=1, journal=journal)
    for number in range(3):
        harness.engine.submit(create_request(max_tokens=4, request_id=f"request-{number}"))
    harness.run()
    blocked = [decision.blocked for decision in journal.record(0.0).decisions]
    assert [None if each is None else (each.request_id, each.reason) for each in blocked] == [
        ("request-1", "no free slot"),
        ("request-2", "no free slot"),
        None,
    ]


def test_a_request_that_left_and_came_back_is_kept_as_long_as_it_lives():
    journal = EventLog(2, 5)
    moving, *others = (create_request() for _ in range(4))
    for each in (moving, *others):
        journal.submitted(each, STANDARD)
    journal.departed(moving, 1.0)
    journal.arrived(moving, STANDARD, 1.0)
    for time, each in enumerate(others, start=2):
        journal.ended(each, float(time))
    assert moving.request_id in {life.request_id for life in journal.lives()}
    journal.ended(moving, 9.0)
    assert [life.request_id for life in journal.ended_since(3.5, 10)] == [others[-1].request_id, moving.request_id]
    assert len(journal.lives()) == 2
