"""The timeline follows the Trace Event Format: complete events in rows without overlap."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from llm_serving.core.timings import HttpTimings
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.timeline import STEPS_ROW, ReplicaTrace, trace
from support.engine_harness import Harness
from support.factories import create_request


def busy_harness(seed: int) -> Harness:
    choose = random.Random(seed)
    now = 1e5

    def clock() -> float:
        nonlocal now
        now += choose.choice([1e-9, 1.7e-4, 0.05])
        return now

    harness = Harness(
        event_log=EventLog(100, 1000),
        clock=clock,
        num_blocks=12,
        max_num_batched_tokens=16,
        ahead=choose.random() < 0.5,
    )
    for number in range(12):
        http_timings = HttpTimings(clock())
        request = create_request(
            choose.randint(1, 20), request_id=f"r-{number}", priority=choose.randint(-1, 1), arrival_time=clock()
        )
        request.http_timings = http_timings
        harness.engine.submit(request)
        for _ in range(choose.randint(0, 4)):
            harness.engine.step()
    return harness


def trace_of(harness: Harness, num_steps: int = 1000, replica: int = 0) -> dict[str, Any]:
    event_log = harness.engine.event_log
    each = ReplicaTrace(replica, event_log.snapshot(harness.engine._clock()), event_log.records())
    return json.loads(json.dumps(trace([each], num_steps)))


def check_format(document: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Check the rules of the format; return the complete events of each row in order of time."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    names: dict[tuple[int, int], str] = {}
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            if event["name"] == "thread_name":
                names[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        rows[event["pid"], event["tid"]].append(event)
    assert rows.keys() <= names.keys(), "every row has a name"
    for events in rows.values():
        events.sort(key=lambda event: event["ts"])
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-4  # a tenth of a nanosecond, for the rounding
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_timeline_spans_of_a_row_never_overlap(seed):
    harness = busy_harness(seed)
    rows = check_format(trace_of(harness))
    assert len(rows) == 13
    harness.run()
    rows = check_format(trace_of(harness))
    steps = rows[0, STEPS_ROW]
    assert [event["args"]["step"] for event in steps] == list(range(harness.engine.num_steps))
    for event in steps:
        args = event["args"]
        assert args["rows"] == args["prefill_rows"] + args["decode_rows"]
        assert args["tokens"] == args["prefill_tokens"] + args["decode_rows"] <= 16
    for (_, tid), events in rows.items():
        if tid != STEPS_ROW:  # a request's spans have no gaps
            assert all(
                before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=1e-4)
                for before, after in pairwise(events)
            )
            assert {"prefill", "decode"} <= {event["name"] for event in events}


def test_timeline_shows_the_newest_steps_and_their_requests():
    harness = busy_harness(1)
    harness.run()
    rows = check_format(trace_of(harness, 5))
    newest = harness.engine.num_steps - 5
    assert [event["args"]["step"] for event in rows[0, STEPS_ROW]] == list(range(newest, newest + 5))
    assert 1 < len(rows) < 13


def test_timeline_shows_each_replica_as_a_process():
    first, second = busy_harness(2), busy_harness(3)
    replicas = [
        ReplicaTrace(index, each.engine.event_log.snapshot(each.engine._clock()), each.engine.event_log.records())
        for index, each in enumerate((first, second))
    ]
    rows = check_format(trace(replicas, 1000))
    assert {pid for pid, _ in rows} == {0, 1}


def test_timeline_without_steps_is_valid():
    assert check_format(trace_of(Harness(event_log=EventLog(5, 5)))) == {}


def test_timeline_of_a_tenant_shows_only_its_own_rows():
    harness = Harness(event_log=EventLog(100, 1000), num_blocks=40, max_num_batched_tokens=64)
    for number, tenant in enumerate(("theirs", "mine", "theirs")):
        request = create_request(4 + number, request_id=f"r-{number}", max_tokens=3 if tenant == "mine" else 9)
        request.tenant = tenant
        harness.engine.submit(request)
        harness.engine.step()
    for _ in range(12):
        harness.engine.step()
    event_log = harness.engine.event_log
    records = [each for each in event_log.records() if each.tenant == "mine"]
    document = trace([ReplicaTrace(0, event_log.snapshot(1e9), records, own_steps_only=True)], 1000)
    rows = check_format(document)
    assert set(rows) == {(0, STEPS_ROW), (0, 1)}
    steps = [event["args"] for event in rows[0, STEPS_ROW]]
    assert [step["rows"] for step in steps] == [1] * len(steps)
    assert [step["tokens"] for step in steps] == [5, 1, 1]
    assert "r-0" not in json.dumps(document)
    whole = check_format(trace([ReplicaTrace(0, event_log.snapshot(1e9), event_log.records())], 1000))
    assert len(whole[0, STEPS_ROW]) > 3


def test_timeline_of_all_tenants_names_the_machine():
    events = EventLog(0, 8).snapshot(1e9)
    names = [
        ReplicaTrace(1, events, (), own_steps_only=of_one, machine=machine).name
        for machine, of_one in (("", False), ("10.0.0.2", False), ("10.0.0.2", True))
    ]
    assert names == ["replica 1", "replica 1 at 10.0.0.2", "replica 1"]
