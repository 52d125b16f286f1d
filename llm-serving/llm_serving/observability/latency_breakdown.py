"""The latency breakdown of a request: time spans with reasons, their sums, and the guaranteed maximum waits."""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from llm_serving.core.request import FinishReason
from llm_serving.observability.event_log import Decision, EventSnapshot, Preempted, RequestRecord, Step, client_id_of
from llm_serving.scheduler.bounds import ClassBounds
from llm_serving.scheduler.schedule import Blocked, WaitReason


class Part(enum.StrEnum):
    TOKENIZING = "tokenizing"
    """From the HTTP headers to the engine's inbox: reading, validation and tokenization."""
    INBOX = "inbox"
    QUEUED = "queued"
    PREFILL = "prefill"
    COMPUTED_AGAIN = "computed again"
    """Steps that recomputed tokens after a preemption."""
    SHARING = "sharing"
    """The request held a running slot, but the step computed only other requests."""
    DECODE = "decode"
    """Steps that computed the latest token of the request."""
    DEVICE = "device"
    """The request held a running slot, and its own step had not started."""
    PREEMPTED = "preempted"
    RESTART = "restart"
    """The WorkAgent was restarting, or the steps were lost when it exited."""
    OTHER_CHOICES = "other choices"
    """The request had ended, but other choices of the same HTTP request had not."""
    SENDING = "sending"
    """From the last token until the last bytes of the response were written to the socket."""
    NOT_KEPT = "not kept"
    """Time whose steps the event log has deleted."""


class Span(NamedTuple):
    start: int
    """Time in nanoseconds on the engine's clock: an integer, so that the lengths of spans add up exactly."""
    end: int
    part: Part
    detail: str = ""
    step: int | None = None


class OwnRow(NamedTuple):
    step: Step
    part: Part
    samples_after_first: bool
    """Whether the request had an output token before the step."""


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def attribute(record: RequestRecord, events: EventSnapshot) -> list[Span]:
    """Return the spans of a request, without gaps, from its arrival to the end of its answer, or to now."""
    return _SpanBuilder(record, events).spans()


def own_rows(record: RequestRecord, events: EventSnapshot) -> list[OwnRow]:
    summary = record.summary
    missed = _is_missed(record, events)
    position = furthest = summary.num_prompt_tokens if missed else 0
    sampled = missed
    rows = []
    for step in events.steps_between(record.arrival_time, _end_of(record, events)):
        chunks = [chunk for chunk in step.chunks if chunk[0] in record.sequences]
        single = not record.sequences.isdisjoint(events.members(step))
        if chunks:
            _, start, count = max(chunks, key=lambda chunk: chunk[1] + chunk[2])
            position = start + count
            num_again = min(position, furthest) - start
            part = Part.COMPUTED_AGAIN if 2 * num_again >= count else Part.PREFILL
        elif single:
            position += 1 + num_accepted_drafts(step, record)
            part = Part.DECODE if sampled else Part.PREFILL  # the last token of its prompt
        else:
            continue
        rows.append(OwnRow(step, part, sampled))
        furthest = max(furthest, position)
        sampled = sampled or single or position >= summary.num_prompt_tokens
    return rows


def num_accepted_drafts(step: Step, record: RequestRecord) -> int:
    """Return how many draft tokens of the request the step accepted. Each of them saved the request a step."""
    return sum(accepted for sequence, _, accepted in step.drafts if sequence in record.sequences)


def largest_decode_gap(record: RequestRecord, events: EventSnapshot, rows: Sequence[OwnRow]) -> int:
    """Return the largest number of consecutive steps that left the request out between two of its tokens."""
    breaks = [each.time for each in record.preemptions] + [outage.ended for outage in events.outages]
    gaps = [
        row.step.number - before.step.number - 1
        for before, row in pairwise(rows)
        if row.samples_after_first and not any(before.step.formed < time <= row.step.formed for time in breaks)
    ]
    return max(gaps, default=0)


class _State(NamedTuple):
    start: int
    kind: str
    preempted: Preempted | None = None
    first_step: int = 0
    """Number of the first step that computes the request, if it holds a running slot."""


class _SpanBuilder:
    """Builds the spans of one request in order. `_cursor` is the end of the latest span."""

    def __init__(self, record: RequestRecord, events: EventSnapshot) -> None:
        self._record = record
        self._events = events
        self._summary = record.summary
        self._rows = own_rows(record, events)
        self._parts = {row.step.number: row.part for row in self._rows}
        self._end = nanoseconds(_end_of(record, events))
        self._states = self._find_states()
        self._state_starts = [state.start for state in self._states]
        self._decisions: list[Decision] = events.decisions
        self._decision_times = [nanoseconds(decision.time) for decision in self._decisions]
        self._outages = [
            (nanoseconds(each.began), self._end if each.ended == math.inf else nanoseconds(each.ended))
            for each in events.outages
        ]
        http_timings = record.http_timings
        self._cursor = nanoseconds(record.arrival_time if http_timings is None else http_timings.received_time)
        self._spans: list[Span] = []

    def spans(self) -> list[Span]:
        record, events, limit = self._record, self._events, self._limit()
        self._until(nanoseconds(record.arrival_time), Part.TOKENIZING)
        if events.kept_since > record.arrival_time:
            self._until(min(limit, nanoseconds(events.kept_since)), Part.NOT_KEPT)
        for step in events.steps_between(record.arrival_time, _end_of(record, events)):
            self._fill(min(limit, nanoseconds(step.formed)))
            end = min(limit, nanoseconds(step.ended))
            part = self._parts.get(step.number)
            if part is None:
                self._fill(end, step)
            else:
                self._until(end, part, step=step.number)
        self._fill(limit)
        self._finish()
        return self._spans

    def _limit(self) -> int:
        replies = [end for row in self._rows if (end := nanoseconds(row.step.ended)) <= self._end]
        complete = self._summary.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return replies[-1] if complete and replies else self._end

    def _finish(self) -> None:
        record, http_timings, now = self._record, self._record.http_timings, nanoseconds(self._events.now)
        self._until(self._end, Part.SENDING)
        if record.ended_time is None or http_timings is None:
            return
        answered = http_timings.response_sent_time
        others_end = now if http_timings.unfinished_request_ids else nanoseconds(http_timings.last_finished_time)
        end = now if answered is None else nanoseconds(answered)
        self._until(min(others_end, end), Part.OTHER_CHOICES)
        self._until(end, Part.SENDING)

    def _find_states(self) -> list[_State]:
        """Return the states of the request in order of time. In the first, it waits in the engine's inbox."""
        record, events = self._record, self._events
        changes: list[_State] = []
        if record.queued_time is not None:
            changes.append(_State(nanoseconds(record.queued_time), "waiting"))
        changes += [_State(nanoseconds(each.time), "preempted", each) for each in record.preemptions]
        changes += [
            _State(nanoseconds(outage.ended), "waiting")
            for outage in events.outages
            if outage.ended < math.inf and record.queued_time is not None and outage.ended > record.queued_time
        ]
        changes += [_State(nanoseconds(row.step.formed), "running", first_step=row.step.number) for row in self._rows]
        if _is_missed(record, events) and not any(each.time < events.kept_since for each in record.preemptions):
            changes.append(_State(nanoseconds(events.kept_since), "running"))
        # At the same time, a preemption comes first: the step decided with it cannot compute the request.
        changes.sort(key=lambda state: (state.start, state.kind == "running"))
        states = [_State(nanoseconds(record.arrival_time), "inbox")]
        for change in changes:
            if change.kind != "running" or states[-1].kind != "running":
                states.append(change)
        return states

    def _fill(self, end: int, step: Step | None = None) -> None:
        """Add spans up to `end` for a time in which no step computes the request. `step`: the step that runs then."""
        while self._cursor < end:
            outage_end = next((over for began, over in self._outages if began <= self._cursor < over), None)
            if outage_end is not None:
                self._until(min(end, outage_end), Part.RESTART)
                continue
            index = bisect_right(self._state_starts, self._cursor) - 1
            decision = bisect_right(self._decision_times, self._cursor) - 1
            cuts = [end, *(began for began, _ in self._outages if began > self._cursor)]
            cuts += self._state_starts[index + 1 : index + 2]
            state = self._states[max(index, 0)]
            if state.kind == "waiting":
                cuts += self._decision_times[decision + 1 : decision + 2]
            part, detail = self._reason(state, decision, step)
            self._until(min(cuts), part, detail, None if step is None else step.number)

    def _reason(self, state: _State, decision: int, step: Step | None) -> tuple[Part, str]:
        if state.kind == "inbox":
            return Part.INBOX, ""
        if state.kind == "waiting":
            return Part.QUEUED, why_queued(self._record, self._decisions[decision].blocked if decision >= 0 else None)
        if state.preempted is not None:
            mode = "swap" if state.preempted.swapped else "recompute"
            return Part.PREEMPTED, f"by class {state.preempted.by_class}, {mode}"
        if step is None:
            return Part.DEVICE, "between steps"
        if step.number < state.first_step:
            return Part.DEVICE, "the step before its own"
        return Part.SHARING, "others' prompts" if step.chunks else "others' tokens"

    def _until(self, end: int, part: Part, detail: str = "", step: int | None = None) -> None:
        if end > self._cursor:
            self._spans.append(Span(self._cursor, end, part, detail, step))
            self._cursor = end


def why_queued(record: RequestRecord, blocked: Blocked | None) -> str:
    """Return why a request waits. `blocked` is the first request that the scheduler could not admit."""
    own = record.request_class
    if blocked is None:
        return "the next step"
    if record.tenant in blocked.full_tenants:
        return WaitReason.TENANT.value
    if own.name in blocked.closed_classes:
        return WaitReason.SHARE.value
    if blocked.request_id is None or blocked.request_id.split("/")[0] == record.request_id:
        return (
            blocked.reason.value
            if blocked.holding_class is None
            else f"{blocked.reason}, behind class {blocked.holding_class}"
        )
    if blocked.class_name == own.name:
        return f"its own class, earlier ({blocked.reason})"
    return f"class {blocked.class_name} ahead ({blocked.reason})"


def _is_missed(record: RequestRecord, events: EventSnapshot) -> bool:
    first = record.summary.first_scheduled_time
    return first is not None and first < events.kept_since


def _end_of(record: RequestRecord, events: EventSnapshot) -> float:
    return events.now if record.ended_time is None else record.ended_time


class ExplainedPart(Struct, kw_only=True):
    what: str
    detail: str
    ms: float
    steps: int


class ExplainedSteps(Struct, kw_only=True):
    """The request's first and last step, and how many steps of each kind ran from its arrival to its end."""

    first: int | None
    last: int | None
    prefill: int
    computed_again: int
    decode: int
    left_out: int
    """Number of steps that did not compute the request while it held a running slot."""


class ExplainedTokens(Struct, kw_only=True):
    prompt: int
    cached: int
    output: int
    accepted_draft: int
    """Draft tokens accepted in the recorded steps: output tokens without a step of their own."""
    guessed: int
    """Deprecated name of `accepted_draft`."""


class BoundAndMet(Struct, kw_only=True):
    bound: int | None
    met: int | None


class ExplainedBounds(Struct, kw_only=True):
    wait: BoundAndMet
    """Steps from arrival to first admission."""
    wait_bound_s: float | None
    """The bound on the wait in seconds, estimated from the recent mean step time."""
    decode_gap: BoundAndMet
    """Consecutive steps without the request between two of its tokens. `met` is null for a beam search."""
    preemptions: BoundAndMet


class ExplainedFirstToken(Struct, kw_only=True):
    """Milliseconds from the arrival at the server to the first token."""

    predicted_ms: float | None
    """Predicted at admission and sent to the client; null if too few steps were measured."""
    real_ms: float | None
    """Measured; null if the request has no token yet."""


class Explanation(Struct, kw_only=True):
    """The latency breakdown of one engine request. Its parts add up to `wall_ms`."""

    id: str
    """The client's id, with a suffix for each choice of the request."""
    request_class: str
    tenant: str | None
    """Null unless API keys identify tenants."""
    replica: int
    status: str
    finish_reason: str | None
    wall_ms: float
    first_token: ExplainedFirstToken
    parts: list[ExplainedPart]
    steps: ExplainedSteps
    tokens: ExplainedTokens
    num_preemptions: int
    num_sharing: int
    """Number of other clients' responses from the same computation."""
    bounds: ExplainedBounds


def answers_to(record: RequestRecord, names: Collection[str]) -> bool:
    """Return whether the client's id or the engine's id of the request is one of `names` (see `client_ids`)."""
    return record.request_id in names or client_id_of(record.request_id) in names


def explain(
    record: RequestRecord,
    events: EventSnapshot,
    bounds: ClassBounds,
    replica: int,
    *,
    with_tenant: bool,
    step_s: float | None = None,
) -> Explanation:
    summary = record.summary
    wait_bound_s = None if summary.wait_bound is None or step_s is None else summary.wait_bound * step_s
    spans, rows = attribute(record, events), own_rows(record, events)
    computed = {part: sum(row.part is part for row in rows) for part in Part}
    num_accepted = sum(num_accepted_drafts(row.step, record) for row in rows)
    gap = None if record.has_beams else largest_decode_gap(record, events, rows)
    return Explanation(
        id=record.request_id,
        request_class=record.request_class.name,
        tenant=record.tenant if with_tenant else None,
        replica=replica,
        status=summary.status,
        finish_reason=summary.finish_reason,
        wall_ms=_ms(spans[-1].end - spans[0].start) if spans else 0.0,
        first_token=_first_token(record),
        parts=_sum_up(spans),
        steps=_steps(rows, computed, spans),
        tokens=ExplainedTokens(
            prompt=summary.num_prompt_tokens,
            cached=summary.num_cached_tokens,
            output=summary.num_output_tokens,
            accepted_draft=num_accepted,
            guessed=num_accepted,
        ),
        num_preemptions=summary.num_preemptions,
        num_sharing=0 if record.http_timings is None else record.http_timings.num_coalesced,
        bounds=ExplainedBounds(
            wait=BoundAndMet(bound=summary.wait_bound, met=summary.num_steps_waited),
            wait_bound_s=wait_bound_s,
            decode_gap=BoundAndMet(bound=bounds.max_decode_gap, met=gap),
            preemptions=BoundAndMet(bound=bounds.max_preemptions, met=summary.num_preemptions),
        ),
    )


def _first_token(record: RequestRecord) -> ExplainedFirstToken:
    predicted_s = None if record.http_timings is None else record.http_timings.predicted_ttft_s
    first_token = record.first_token_time
    began = record.arrival_time if record.http_timings is None else record.http_timings.received_time
    return ExplainedFirstToken(
        predicted_ms=None if predicted_s is None else 1000 * predicted_s,
        real_ms=None if first_token is None else 1000 * (first_token - began),
    )


def _sum_up(spans: Iterable[Span]) -> list[ExplainedPart]:
    sums: dict[tuple[Part, str], int] = {}
    steps: dict[tuple[Part, str], set[int]] = {}
    for span in spans:
        key = (span.part, span.detail)
        sums[key] = sums.get(key, 0) + span.end - span.start
        if span.step is not None:
            steps.setdefault(key, set()).add(span.step)
    return [
        ExplainedPart(what=part.value, detail=detail, ms=_ms(total), steps=len(steps.get((part, detail), ())))
        for (part, detail), total in sums.items()
    ]


def _steps(rows: Sequence[OwnRow], computed: dict[Part, int], spans: Iterable[Span]) -> ExplainedSteps:
    return ExplainedSteps(
        first=rows[0].step.number if rows else None,
        last=rows[-1].step.number if rows else None,
        prefill=computed[Part.PREFILL],
        computed_again=computed[Part.COMPUTED_AGAIN],
        decode=computed[Part.DECODE],
        left_out=len({span.step for span in spans if span.part is Part.SHARING}),
    )


def _ms(nanoseconds: int) -> float:
    return nanoseconds / 1e6
