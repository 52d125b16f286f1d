"""Where the time of a request went: spans with a reason each, their sums, and the bounds of its class."""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from llm_serving.core.request import FinishReason
from llm_serving.observability.event_log import Decision, Preempted, Record, RequestRecord, Step, client_id_of
from llm_serving.scheduler.bounds import ClassBounds
from llm_serving.scheduler.schedule import Blocked, WaitReason


class Part(enum.StrEnum):
    TOKENIZING = "tokenizing"
    """From its headers to the engine's inbox: reading, checking and tokenizing it."""
    INBOX = "inbox"
    """The engine had not looked into its inbox."""
    QUEUED = "queued"
    PREFILL = "prefill"
    """Steps that computed its prompt."""
    COMPUTED_AGAIN = "computed again"
    """Steps that computed what had been computed before it lost its place."""
    SHARING = "sharing"
    """It ran, but the step computed others and left it out."""
    DECODE = "decode"
    """Steps that computed its newest token."""
    DEVICE = "device"
    """It had its place, and the step before its own still ran, or none did."""
    PREEMPTED = "preempted"
    RESTART = "restart"
    """Steps were lost with the WorkAgent, or it was being started again."""
    OTHER_CHOICES = "other choices"
    """It had ended, others that answer the same HTTP request had not."""
    SENDING = "sending"
    """From its last token to the last bytes handed to the socket."""
    NOT_KEPT = "not kept"
    """The steps of that time are no longer in the journal."""


class Span(NamedTuple):
    start: int
    """Nanoseconds on the engine's clock: whole numbers, so that spans add up exactly."""
    end: int
    part: Part
    detail: str = ""
    step: int | None = None
    """The step that ran meanwhile."""


class OwnRow(NamedTuple):
    """A step that computed the request."""

    step: Step
    part: Part
    samples_after_first: bool
    """Whether the request had a token already."""


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def attribute(life: RequestRecord, record: Record) -> list[Span]:
    """The spans of a request without gaps, from its arrival to the end of its answer or to now."""
    return _Walk(life, record).spans()


def own_rows(life: RequestRecord, record: Record) -> list[OwnRow]:
    """The kept steps that computed the request, in order."""
    facts = life.facts
    missed = _is_missed(life, record)
    position = furthest = facts.num_prompt_tokens if missed else 0
    sampled = missed
    rows = []
    for step in record.steps_between(life.arrival_time, _end_of(life, record)):
        chunks = [chunk for chunk in step.chunks if chunk[0] in life.sequences]
        single = not life.sequences.isdisjoint(record.members(step))
        if chunks:
            _, start, count = max(chunks, key=lambda chunk: chunk[1] + chunk[2])
            position = start + count
            num_again = min(position, furthest) - start
            part = Part.COMPUTED_AGAIN if 2 * num_again >= count else Part.PREFILL
        elif single:
            position += 1 + num_accepted_drafts(step, life)
            part = Part.DECODE if sampled else Part.PREFILL  # one token was left of its prompt
        else:
            continue
        rows.append(OwnRow(step, part, sampled))
        furthest = max(furthest, position)
        sampled = sampled or single or position >= facts.num_prompt_tokens
    return rows


def num_accepted_drafts(step: Step, life: RequestRecord) -> int:
    """Return the request's accepted draft tokens in a step: tokens without a step of their own."""
    return sum(accepted for sequence, _, accepted in step.drafts if sequence in life.sequences)


def largest_decode_gap(life: RequestRecord, record: Record, rows: Sequence[OwnRow]) -> int:
    """Most steps in a row that left it out between two of its tokens, while it had its place."""
    breaks = [each.time for each in life.preemptions] + [outage.ended for outage in record.outages]
    gaps = [
        row.step.number - before.step.number - 1
        for before, row in pairwise(rows)
        if row.samples_after_first and not any(before.step.formed < time <= row.step.formed for time in breaks)
    ]
    return max(gaps, default=0)


class _State(NamedTuple):
    """What a request is doing from `start` on, where no step computes it."""

    start: int
    kind: str
    preempted: Preempted | None = None
    first_step: int = 0
    """Of a request that has its place: the first step that computes it."""


class _Walk:
    """Goes through the life once; `_cursor` is how far it has come."""

    def __init__(self, life: RequestRecord, record: Record) -> None:
        self._life = life
        self._record = record
        self._facts = life.facts
        self._rows = own_rows(life, record)
        self._parts = {row.step.number: row.part for row in self._rows}
        self._end = nanoseconds(_end_of(life, record))
        self._states = self._find_states()
        self._state_starts = [state.start for state in self._states]
        self._decisions: list[Decision] = record.decisions
        self._decision_times = [nanoseconds(decision.time) for decision in self._decisions]
        self._outages = [
            (nanoseconds(each.began), self._end if each.ended == math.inf else nanoseconds(each.ended))
            for each in record.outages
        ]
        http_timings = life.http_timings
        self._cursor = nanoseconds(life.arrival_time if http_timings is None else http_timings.received_time)
        self._spans: list[Span] = []

    def spans(self) -> list[Span]:
        life, record, limit = self._life, self._record, self._limit()
        self._until(nanoseconds(life.arrival_time), Part.TOKENIZING)
        if record.kept_since > life.arrival_time:
            self._until(min(limit, nanoseconds(record.kept_since)), Part.NOT_KEPT)
        for step in record.steps_between(life.arrival_time, _end_of(life, record)):
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
        """Until when the request was in the hands of the scheduler: to its last token, if it was not broken off."""
        replies = [end for row in self._rows if (end := nanoseconds(row.step.ended)) <= self._end]
        complete = self._facts.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return replies[-1] if complete and replies else self._end

    def _finish(self) -> None:
        """What comes after the engine has ended the request."""
        life, http_timings, now = self._life, self._life.http_timings, nanoseconds(self._record.now)
        self._until(self._end, Part.SENDING)
        if life.ended_time is None or http_timings is None:
            return
        answered = http_timings.response_sent_time
        others_end = now if http_timings.unfinished_request_ids else nanoseconds(http_timings.last_finished_time)
        end = now if answered is None else nanoseconds(answered)
        self._until(min(others_end, end), Part.OTHER_CHOICES)
        self._until(end, Part.SENDING)

    def _find_states(self) -> list[_State]:
        """In order of time; the first is the inbox."""
        life, record = self._life, self._record
        changes: list[_State] = []
        if life.queued_time is not None:
            changes.append(_State(nanoseconds(life.queued_time), "waiting"))
        changes += [_State(nanoseconds(each.time), "preempted", each) for each in life.preemptions]
        changes += [
            _State(nanoseconds(outage.ended), "waiting")
            for outage in record.outages
            if outage.ended < math.inf and life.queued_time is not None and outage.ended > life.queued_time
        ]
        changes += [_State(nanoseconds(row.step.formed), "running", first_step=row.step.number) for row in self._rows]
        if _is_missed(life, record) and not any(each.time < record.kept_since for each in life.preemptions):
            changes.append(_State(nanoseconds(record.kept_since), "running"))
        # A step that is formed while a request loses its place cannot compute it: what makes it run comes after.
        changes.sort(key=lambda state: (state.start, state.kind == "running"))
        states = [_State(nanoseconds(life.arrival_time), "inbox")]
        for change in changes:
            if change.kind != "running" or states[-1].kind != "running":
                states.append(change)
        return states

    def _fill(self, end: int, step: Step | None = None) -> None:
        """Goes to `end` through time in which the request is not computed; `step` runs meanwhile."""
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
            return Part.QUEUED, why_queued(self._life, self._decisions[decision].blocked if decision >= 0 else None)
        if state.preempted is not None:
            return Part.PREEMPTED, f"by class {state.preempted.by_class}, {_way(state.preempted)}"
        if step is None:
            return Part.DEVICE, "between steps"
        if step.number < state.first_step:
            return Part.DEVICE, "the step before its own"
        return Part.SHARING, "others' prompts" if step.chunks else "others' tokens"

    def _until(self, end: int, part: Part, detail: str = "", step: int | None = None) -> None:
        if end > self._cursor:
            self._spans.append(Span(self._cursor, end, part, detail, step))
            self._cursor = end


def why_queued(life: RequestRecord, blocked: Blocked | None) -> str:
    """What a waiting request waits behind, from what the scheduler said of whom it left waiting."""
    own = life.request_class
    if blocked is None:
        return "the next step"
    if life.tenant in blocked.full_tenants:
        return WaitReason.TENANT.value
    if own.name in blocked.closed_classes:
        return WaitReason.SHARE.value
    if blocked.request_id is None or blocked.request_id.split("/")[0] == life.request_id:
        return (
            blocked.reason.value
            if blocked.holding_class is None
            else f"{blocked.reason}, behind class {blocked.holding_class}"
        )
    if blocked.class_name == own.name:
        return f"its own class, earlier ({blocked.reason})"
    return f"class {blocked.class_name} ahead ({blocked.reason})"


def _way(preempted: Preempted) -> str:
    return "swap" if preempted.swapped else "recompute"


def _is_missed(life: RequestRecord, record: Record) -> bool:
    """Whether it ran in steps that are no longer kept."""
    first = life.facts.first_scheduled_time
    return first is not None and first < record.kept_since


def _end_of(life: RequestRecord, record: Record) -> float:
    return record.now if life.ended_time is None else life.ended_time


class ExplainedPart(Struct, kw_only=True):
    """Time that went into one thing."""

    what: str
    detail: str
    ms: float
    steps: int
    """That ran meanwhile."""


class ExplainedSteps(Struct, kw_only=True):
    """Steps from its arrival to its end."""

    first: int | None
    """Number of the first step that computed it; None: none did, or it is no longer kept."""
    last: int | None
    prefill: int
    computed_again: int
    decode: int
    left_out: int
    """Steps it shared while it had its place."""


class ExplainedTokens(Struct, kw_only=True):
    prompt: int
    cached: int
    """Of the prompt, found computed."""
    output: int
    accepted_draft: int
    """Output tokens that took no step of their own, because they were accepted draft tokens; of the steps still
    known."""
    guessed: int
    """Deprecated name of `accepted_draft`."""


class BoundAndMet(Struct, kw_only=True):
    """What the request was promised, and what it met; in steps or times."""

    bound: int | None
    met: int | None


class ExplainedBounds(Struct, kw_only=True):
    wait: BoundAndMet
    """Steps from its arrival to its first admission."""
    wait_bound_s: float | None
    """Seconds that the bound comes to at the time a step takes of late."""
    decode_gap: BoundAndMet
    """Steps in a row that left it out between two of its tokens; null where its next step waits for more."""
    preemptions: BoundAndMet


class ExplainedFirstToken(Struct, kw_only=True):
    """Milliseconds from the arrival at the server to the first token."""

    predicted_ms: float | None
    """Told to the client when it was let in; null: too little had been measured."""
    real_ms: float | None
    """Null: it has none yet."""


class Explanation(Struct, kw_only=True):
    """Where the time of one request of the engine went; the parts add up to `wall_ms`."""

    id: str
    """The client's id, and a number that tells choices apart."""
    request_class: str
    tenant: str | None
    """Only told where API keys say who asks."""
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
    """Answers that others got from the same computation as those of this HTTP request."""
    bounds: ExplainedBounds


def answers_to(life: RequestRecord, names: Collection[str]) -> bool:
    """Whether a client means this request by one of `names`, which are `client_ids`: its own id, that of the answer, or
    the engine's."""
    return life.request_id in names or client_id_of(life.request_id) in names


def explain(
    life: RequestRecord,
    record: Record,
    bounds: ClassBounds,
    replica: int,
    *,
    with_tenant: bool,
    step_s: float | None = None,
) -> Explanation:
    """The explanation of one request from a record of its engine's journal; `step_s` is how long a step takes."""
    facts = life.facts
    wait_bound_s = None if facts.wait_bound is None or step_s is None else facts.wait_bound * step_s
    spans, rows = attribute(life, record), own_rows(life, record)
    computed = {part: sum(row.part is part for row in rows) for part in Part}
    num_accepted = sum(num_accepted_drafts(row.step, life) for row in rows)
    gap = None if life.has_beams else largest_decode_gap(life, record, rows)
    return Explanation(
        id=life.request_id,
        request_class=life.request_class.name,
        tenant=life.tenant if with_tenant else None,
        replica=replica,
        status=facts.status,
        finish_reason=facts.finish_reason,
        wall_ms=_ms(spans[-1].end - spans[0].start) if spans else 0.0,
        first_token=_first_token(life),
        parts=_sum_up(spans),
        steps=_steps(rows, computed, spans),
        tokens=ExplainedTokens(
            prompt=facts.num_prompt_tokens,
            cached=facts.num_cached_tokens,
            output=facts.num_output_tokens,
            accepted_draft=num_accepted,
            guessed=num_accepted,
        ),
        num_preemptions=facts.num_preemptions,
        num_sharing=0 if life.http_timings is None else life.http_timings.num_coalesced,
        bounds=ExplainedBounds(
            wait=BoundAndMet(bound=facts.wait_bound, met=facts.num_steps_waited),
            wait_bound_s=wait_bound_s,
            decode_gap=BoundAndMet(bound=bounds.max_decode_gap, met=gap),
            preemptions=BoundAndMet(bound=bounds.max_preemptions, met=facts.num_preemptions),
        ),
    )


def _first_token(life: RequestRecord) -> ExplainedFirstToken:
    predicted_s = None if life.http_timings is None else life.http_timings.predicted_ttft_s
    came = life.first_token_time
    began = life.arrival_time if life.http_timings is None else life.http_timings.received_time
    return ExplainedFirstToken(
        predicted_ms=None if predicted_s is None else 1000 * predicted_s,
        real_ms=None if came is None else 1000 * (came - began),
    )


def _sum_up(spans: Iterable[Span]) -> list[ExplainedPart]:
    """One part for each reason, in the order in which they first came."""
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
