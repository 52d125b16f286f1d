"""The event log as a trace for Perfetto and Chrome's `about:tracing`.

The format is the JSON object form of the Trace Event Format: complete events (`ph` X) with `ts` and `dur` in
microseconds, and metadata events (`ph` M) for names. Events of one row (`pid`, `tid`) do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from llm_serving.observability.event_log import EventSnapshot, RequestRecord, Step
from llm_serving.observability.latency_breakdown import Span, attribute, nanoseconds

STEPS_ROW: Final = 0
"""`tid` of the row that shows steps. The rows of requests start at 1."""

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class ReplicaTrace:
    """Input of a trace for one replica. The index of the replica is the `pid` in the trace."""

    replica: int
    events: EventSnapshot
    records: Sequence[RequestRecord]
    own_steps_only: bool = False
    """Whether to show only `records` and steps that computed them, because a client sees only its own tenant."""
    machine: str = ""

    @property
    def name(self) -> str:
        where = f" at {self.machine}" if self.machine and not self.own_steps_only else ""
        return f"replica {self.replica}{where}"


def trace(replicas: Sequence[ReplicaTrace], num_steps: int) -> JsonObject:
    """Return a trace of the latest `num_steps` steps of each replica, and of the requests unfinished during them."""
    events: list[JsonObject] = []
    spans = [(each, *_shown(each, num_steps)) for each in replicas]
    starts = [start for _, _, _, start in spans if start is not None]
    origin = min(starts, default=0)

    def microseconds(time: int) -> float:
        return (time - origin) / 1000

    for each, steps, requests, _ in spans:
        events += _metadata(each.replica, STEPS_ROW, each.name, "steps")
        events += _step_events(each.replica, steps, microseconds)
        for position, (record, request_spans) in enumerate(requests, STEPS_ROW + 1):
            # The number of a request would reveal how many requests other tenants sent.
            row = position if each.own_steps_only else record.number
            events += _metadata(each.replica, row, None, record.request_id)
            events += _request_events(each.replica, row, record, request_spans, microseconds)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _shown(
    replica: ReplicaTrace, num_steps: int
) -> tuple[list[tuple[Step, int, int]], list[tuple[RequestRecord, list[Span]]], int | None]:
    events = replica.events
    steps: list[tuple[Step, int, int]] = []
    end = 0
    for step in events.steps:
        began, end = max(nanoseconds(step.formed), end), nanoseconds(step.ended)
        steps.append((step, began, max(began, end)))
    if replica.own_steps_only:
        own = frozenset[int]().union(*(record.sequences for record in replica.records))
        steps = [(part, began, end) for step, began, end in steps if (part := _part(step, own)).num_tokens]
    steps = steps[-num_steps:]
    since = steps[0][1] if steps else 0
    requests = [
        (record, spans)
        for record in replica.records
        if record.ended_time is None or nanoseconds(record.ended_time) >= since
        if (spans := attribute(record, events))
    ]
    starts = [spans[0].start for _, spans in requests] + ([since] if steps else [])
    return steps, requests, min(starts, default=None)


def _part(step: Step, sequences: Set[int]) -> Step:
    return step._replace(
        singles=tuple([each for each in step.singles if each in sequences]),
        chunks=tuple([chunk for chunk in step.chunks if chunk[0] in sequences]),
        drafts=tuple([draft for draft in step.drafts if draft[0] in sequences]),
    )


def _metadata(pid: int, tid: int, process: str | None, thread: str) -> Iterator[JsonObject]:
    if process is not None:
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": tid, "args": {"name": process}}
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": thread}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _step_events(
    pid: int, steps: Sequence[tuple[Step, int, int]], microseconds: Callable[[int], float]
) -> Iterator[JsonObject]:
    for step, began, ended in steps:
        num_prefill = sum(count for _, _, count in step.chunks)
        kinds = [kind for kind, some in (("prefill", step.chunks), ("decode", step.singles)) if some]
        yield {
            "ph": "X",
            "name": " + ".join(kinds),
            "cat": "step",
            "pid": pid,
            "tid": STEPS_ROW,
            "ts": microseconds(began),
            "dur": (ended - began) / 1000,
            "args": {
                "step": step.number,
                "rows": len(step.singles) + len(step.chunks),
                "tokens": step.num_tokens,
                "prefill_rows": len(step.chunks),
                "prefill_tokens": num_prefill,
                "decode_rows": len(step.singles),
            },
        }


def _request_events(
    pid: int, tid: int, record: RequestRecord, spans: Sequence[Span], microseconds: Callable[[int], float]
) -> Iterator[JsonObject]:
    for start, end, span, num_steps in _joined(spans):
        args: JsonObject = {"steps": num_steps, "class": record.request_class.name}
        yield {
            "ph": "X",
            "name": span.part.value,
            "cat": "request",
            "pid": pid,
            "tid": tid,
            "ts": microseconds(start),
            "dur": (end - start) / 1000,
            "args": args | ({"detail": span.detail} if span.detail else {}),
        }


def _joined(spans: Sequence[Span]) -> Iterator[tuple[int, int, Span, int]]:
    """Merge consecutive spans with the same reason. Yield (start, end, first span, number of steps)."""
    for _, group in groupby(spans, key=lambda span: (span.part, span.detail)):
        members = list(group)
        yield members[0].start, members[-1].end, members[0], len({span.step for span in members} - {None})
