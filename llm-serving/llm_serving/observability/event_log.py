"""The event log: a limited history of requests and steps.

The record of a step contains the requests that the step computed. The record of a request contains the few times at
which its state changed. So no step has to write to the record of each request. `latency_breakdown.py` combines both
when a breakdown is requested.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, takewhile
from operator import attrgetter
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import HttpTimings
from llm_serving.observability.step_observer import CompletedStep, StepObserver
from llm_serving.scheduler import Schedule
from llm_serving.scheduler.schedule import Blocked

ROW_SEQUENCE: Final = attrgetter("request.sequence")
ID_PREFIXES: Final = ("cmpl-", "chatcmpl-")


class Step(NamedTuple):
    """A step, timed by the engine's clock. It began at the later of `formed` and the end of the previous step."""

    number: int
    formed: float
    ended: float
    singles: tuple[int, ...]
    """`Request.sequence` of each row that computed one token and sampled the next."""
    chunks: tuple[tuple[int, int, int], ...]
    """(`Request.sequence`, index of the first token, number of tokens) of each row that is not in `singles`."""
    drafts: tuple[tuple[int, int, int], ...] = ()
    """(`Request.sequence`, number of draft tokens verified, number accepted) of each row in `singles` with drafts."""

    @property
    def num_tokens(self) -> int:
        num_draft_tokens = sum(verified for _, verified, _ in self.drafts)
        return len(self.singles) + num_draft_tokens + sum(count for _, _, count in self.chunks)


class Preempted(NamedTuple):
    time: float
    by_class: str
    swapped: bool


class Decision(NamedTuple):
    time: float
    blocked: Blocked | None


class Outage(NamedTuple):
    """A period without results, because steps were lost or the WorkAgent restarted. `ended` is inf while it lasts."""

    began: float
    ended: float


class RequestSummary(NamedTuple):
    status: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_steps_waited: int | None
    wait_bound: int | None
    first_scheduled_time: float | None


@dataclass(eq=False, slots=True)
class RequestRecord:
    """The history of one request. After the request has ended, the record holds no texts or tokens."""

    request_id: str
    tenant: str
    request_class: RequestClass
    number: int
    http_timings: HttpTimings | None
    arrival_time: float
    _request: Request | None
    _summary: RequestSummary | None = None
    queued_time: float | None = None
    first_token_time: float | None = None
    ended_time: float | None = None
    has_beams: bool = False
    """Whether the request is a beam search. Its beams wait for each other, so token gaps have no bound."""
    sequences: frozenset[int] = frozenset()
    preemptions: tuple[Preempted, ...] = ()

    @property
    def summary(self) -> RequestSummary:
        request = self._request
        if request is None:
            assert self._summary is not None
            return self._summary
        return RequestSummary(
            request.status.value,
            request.finish_reason,
            request.num_prompt_tokens,
            request.num_cached_tokens,
            len(request.output_token_ids),
            len(self.preemptions),
            request.num_steps_waited,
            request.wait_bound,
            request.first_scheduled_time,
        )


@dataclass(eq=False)
class EventSnapshot:
    """An immutable copy of an event log, in order of time: the steps since `kept_since`, the outages, and `decisions`,
    each with the waiting request that was blocked then. The last two steps may be in flight; their end is then `now`.
    """

    now: float
    steps: list[Step]
    decisions: list[Decision]
    outages: list[Outage]
    kept_since: float
    _members: dict[int, frozenset[int]] = field(default_factory=dict)

    def members(self, step: Step) -> frozenset[int]:
        """Return `step.singles`, the requests that decoded one token, as a set. Steps with the same tuple share it."""
        key = id(step.singles)
        found = self._members.get(key)
        if found is None:
            found = self._members[key] = frozenset(step.singles)
        return found

    def steps_between(self, start: float, end: float) -> list[Step]:
        first = bisect_left(self._ends, start)
        last = bisect_left(self._formed, end)
        return self.steps[first:last]

    @cached_property
    def _ends(self) -> list[float]:
        return [step.ended for step in self.steps]

    @cached_property
    def _formed(self) -> list[float]:
        return [step.formed for step in self.steps]


class EventLog(StepObserver):
    """The event log of one engine. Only the engine's thread writes; any thread may read snapshots and records. It holds
    the unfinished requests, the latest `num_requests` ended ones and the latest `num_steps` steps. If `num_requests` is
    0, the log records nothing.
    """

    def __init__(self, num_requests: int = 0, num_steps: int = 1) -> None:
        self.enabled = num_requests > 0
        self._num_requests = num_requests
        self._num_submitted = 0
        self._records: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque()
        self._steps: deque[Step] = deque(maxlen=num_steps)
        self._in_flight: deque[Step] = deque()
        self._decisions: deque[Decision] = deque(maxlen=num_steps)
        self._outages: deque[Outage] = deque(maxlen=num_steps)
        self._blocked: Blocked | None = None
        self._singles: tuple[int, ...] = ()

    # --- events of requests -----------------------------------------------------------------------------------------

    def submitted(self, request: Request, request_class: RequestClass) -> None:
        if not self.enabled:
            return
        self._num_submitted += 1
        request_id, timings = request.request_id, request.http_timings
        self._records[request_id] = RequestRecord(
            request_id, request.tenant, request_class, self._num_submitted, timings, request.arrival_time, request
        )
        if timings is not None:
            timings.unfinished_request_ids.add(request_id)

    def forget(self, request: Request) -> None:
        self._records.pop(request.request_id, None)
        if request.http_timings is not None:
            request.http_timings.unfinished_request_ids.discard(request.request_id)

    def departed(self, request: Request, now: float) -> None:
        """Record that the request migrated to another replica. Its history up to `now` stays in this log."""
        if (record := self._records.get(request.request_id)) is not None:
            self._end(record, now, "moved")

    def arrived(self, request: Request, request_class: RequestClass, since: float) -> None:
        """Record that the request migrated here from another replica, which stopped computing it at `since`."""
        self.submitted(request, request_class)
        if (record := self._records.get(request.request_id)) is not None:
            record.arrival_time = since

    def queued(self, request: Request, now: float) -> None:
        record = self._records.get(request.request_id)
        if record is None:
            return
        record.queued_time = now
        computed: Sequence[Request] = (request,) if request.sink is None else request.sink.active_requests
        record.sequences = frozenset(map(attrgetter("sequence"), computed))
        record.has_beams = request.beam_search is not None

    def first_token(self, request: Request, now: float) -> None:
        if (record := self._records.get(request.request_id)) is not None:
            record.first_token_time = now

    def class_changed(self, request: Request, request_class: RequestClass) -> None:
        if (record := self._records.get(request.request_id)) is not None:
            record.request_class = request_class

    def ended(self, request: Request, now: float) -> None:
        if (record := self._records.get(request.request_id)) is None:
            return
        self._end(record, now, "finished")
        if (http_timings := record.http_timings) is not None:
            http_timings.last_finished_time = max(http_timings.last_finished_time, now)
            http_timings.unfinished_request_ids.discard(record.request_id)

    def _end(self, record: RequestRecord, now: float, status: str) -> None:
        record._summary = record.summary._replace(status=status)
        record._request = None
        record.ended_time = now
        self._ended.append(record)
        if len(self._ended) > self._num_requests:
            oldest = self._ended.popleft()
            if self._records.get(oldest.request_id) is oldest:  # a request that departed may have returned
                del self._records[oldest.request_id]

    # --- events of steps --------------------------------------------------------------------------------------------

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        if blocked != self._blocked:
            self._blocked = blocked
            self._decisions.append(Decision(now, blocked))

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        rows = decoded = schedule.rows
        chunks: list[tuple[int, int, int]] = []
        if schedule.num_tokens != schedule.num_samples:  # the step computes prompts too
            decoded = []
            for row in rows:
                if row.query_len == row.num_samples:
                    decoded.append(row)
                else:
                    chunks.append((row.request.sequence, row.num_computed, row.query_len))
        singles = tuple(map(ROW_SEQUENCE, decoded))
        if singles == self._singles:
            singles = self._singles  # consecutive steps of the same decoding requests share one tuple
        self._singles = singles
        drafts: tuple[tuple[int, int, int], ...] = ()
        if schedule.has_draft_tokens:
            drafts = tuple([(row.request.sequence, row.num_drafts, 0) for row in rows if row.num_drafts])
        self._in_flight.append(Step(schedule.step, now, math.inf, singles, tuple(chunks), drafts))
        for request in schedule.started:
            if (record := self._records.get(request.root_request.request_id)) is not None:
                record.sequences |= {request.sequence}
        for request, preemption in zip(schedule.preempted, schedule.preemptions, strict=True):
            if (record := self._records.get(request.root_request.request_id)) is not None:
                record.preemptions += (Preempted(now, preemption.by_class, preemption.swapped),)

    def on_completed(self, step: CompletedStep) -> None:
        ended = self._in_flight.popleft()._replace(ended=step.now)
        if ended.drafts:
            accepted = step.accepted
            ended = ended._replace(
                drafts=tuple([(each, verified, accepted.get(each, 0)) for each, verified, _ in ended.drafts])
            )
        self._steps.append(ended)

    def on_failed(self, now: float) -> None:
        began = self._in_flight[0].formed if self._in_flight else now
        if self._steps:
            began = max(began, self._steps[-1].ended)
        self._in_flight.clear()
        self._outages.append(Outage(began, math.inf))

    def recovered(self, now: float) -> None:
        if self.enabled:
            self._outages[-1] = self._outages[-1]._replace(ended=now)

    # --- reading ----------------------------------------------------------------------------------------------------

    def records(self) -> list[RequestRecord]:
        return list(self._records.values())

    def snapshot(self, now: float) -> EventSnapshot:
        """Return the steps, decisions and outages up to `now`. Thread-safe."""
        # In this order a step that ends meanwhile is seen twice, never missed.
        in_flight, steps = list(self._in_flight), list(self._steps)
        full = len(steps) == self._steps.maxlen
        newest = steps[-1].number if steps else -1
        steps += [step._replace(ended=now) for step in in_flight if step.number > newest]
        kept_since = steps[0].formed if full else -math.inf
        return EventSnapshot(now, steps, list(self._decisions), list(self._outages), kept_since)

    def steps_since(self, time: float, count: int) -> list[tuple[float, Step]]:
        """Return (start, step) of the last `count` steps that ended after `time`. Only for the engine's thread."""
        newest = list(islice(reversed(self._steps), count + 1))
        began = [max(step.formed, before.ended) for step, before in pairwise(newest)]
        began += [step.formed for step in newest[len(began) :]]
        found = [each for each in zip(began, newest, strict=True) if each[1].ended > time]
        return found[:count][::-1]

    def ended_since(self, time: float, count: int) -> list[RequestRecord]:
        """Return the last `count` requests that ended after `time`, in order. Only for the engine's thread."""
        newest = takewhile(lambda each: each.ended_time is not None and each.ended_time > time, reversed(self._ended))
        return list(islice(newest, count))[::-1]


def client_ids(request_id: str) -> list[str]:
    """Return the ids that a client may have sent for a request: `request_id`, and the part after `chatcmpl-` etc."""
    return [request_id, *(request_id.removeprefix(prefix) for prefix in ID_PREFIXES if request_id.startswith(prefix))]


def client_id_of(engine_id: str) -> str:
    """Return the part of an engine's request id that the client knows. The rest is a random number."""
    return engine_id.rpartition("-")[0]
