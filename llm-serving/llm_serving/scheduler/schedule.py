"""What the scheduler decides: the rows of one step.

What the scheduler tells of those it left waiting, and of those it made wait again.

Whom a step leaves waiting, and why.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.step import BlockMove
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.waiting import WaitingRequests


class WaitReason(enum.StrEnum):
    """Why a step was formed without the request that was to be admitted next."""

    SLOTS = "no free slot"
    BLOCKS = "no free block"
    BUDGET = "the step has all its tokens"
    PROMPTS = "the step has all its prompts"
    SHARE = "share limit of its class"
    IN_FLIGHT = "its newest token is not back"
    DECODING = "the step only decodes"
    BATCH = "a batch is collected"
    TENANT = "its tenant runs as many as it may"


NO_ROOM: Final = (WaitReason.BUDGET, WaitReason.PROMPTS)
"""Reasons that are the step's alone: with a smaller step before it, the request might have been admitted."""


class Blocked(NamedTuple):
    """Who was to be admitted next and was not; everybody who waits and is not of a closed class is behind it."""

    request_id: str | None
    """None where the reason holds for all."""
    class_name: str | None
    reason: WaitReason
    holding_class: str | None = None
    """Another class, the one that holds most of the places the reason is about, if any does."""
    closed_classes: tuple[str, ...] = ()
    """Classes passed over, as they hold as many slots or blocks as they may."""
    full_tenants: tuple[str, ...] = ()
    """Tenants that run as many requests as they may; their others are in nobody's way."""

    @classmethod
    def of(cls, request: Request, reason: WaitReason) -> Blocked:
        return cls(request.request_id, request.request_class.name, reason)


class Preemption(NamedTuple):
    """A running request that lost its place."""

    request_id: str
    by_class: str
    """The class it was done for; its own where it gave way to others of its class."""
    swapped: bool
    """Whether what it had computed was moved out; otherwise it is computed again."""


class ScheduledRow(NamedTuple):
    """One request's share of a step."""

    request: Request
    num_computed: int
    """Tokens in the cache before the step."""
    query_len: int
    """Tokens this step computes."""
    num_samples: int
    """Tokens that are chosen: none as long as known ones are left to compute, then one, and one behind each draft."""
    num_preemptions: int
    """Of the request when the row was made; once it has lost its place since, the row's keys and values are gone."""

    @property
    def end(self) -> int:
        return self.num_computed + self.query_len

    @property
    def num_drafts(self) -> int:
        """Number of draft tokens, the last ones of the row."""
        return max(0, self.num_samples - 1)


class PromptResults(NamedTuple):
    """What a row tells of its request's prompt."""

    row: int
    """Its index."""
    start: int
    end: int
    """Log-probabilities are wanted of what may follow the tokens [start, end) of the prompt; none where these meet."""
    vector: bool
    """Whether the hidden state of the last token of the prompt is wanted."""
    ends: bool
    """Whether that is all there is of the request."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `schedule` decided; `update` takes it back with the tokens that came of it."""

    step: int
    rows: list[ScheduledRow]
    block_moves: list[BlockMove] = field(default_factory=list)
    """To be done in order before the rows are computed."""
    started: list[Request] = field(default_factory=list)
    """Requests of the rows that are scheduled for the first time."""
    preempted: list[Request] = field(default_factory=list)
    """Requests that lost their place since the schedule before this one, once for each time."""
    preemptions: list[Preemption] = field(default_factory=list)
    """What is to tell of each of `preempted`, in the same order."""
    prompt_results: list[PromptResults] = field(default_factory=list)
    """Of the rows that tell something of a prompt, in their order."""
    has_draft_tokens: bool = False
    """Whether rows verify draft tokens."""
    migrating: list[ScheduledRow] = field(default_factory=list)
    """Rows whose requests leave for another replica when the reply has come, unless they end with it."""
    exports: list[BlockMove] = field(default_factory=list)
    """Of their blocks, to be done when the rows are computed."""
    num_bound_violations: int = 0
    """Requests that have just waited longer than a bound allows; 0 unless the scheduler has a fault."""
    num_tokens: int = field(init=False)
    num_samples: int = field(init=False)
    """Tokens that are chosen."""

    def __post_init__(self) -> None:
        """Counts once what is asked several times a step; by index, as rows are many."""
        object.__setattr__(self, "num_tokens", sum([row[2] for row in self.rows]))
        object.__setattr__(self, "num_samples", sum([row[3] for row in self.rows]))


class StepPlan:
    """A step while it is being formed."""

    def __init__(self, number: int, now: float, budget: int, max_prefills: int) -> None:
        self.number = number
        self.now = now
        """When it is formed, in seconds on the clock of `Request.arrival_time`."""
        self.budget = budget
        self.closed_classes: set[str] = set()
        """Classes that hold as many slots or blocks as they may."""
        self.first_class: str | None = None
        """The class whose turn it is, where several contend."""
        self.blocked: Blocked | None = None
        self.changes_running = False
        """Whether a request has been admitted or preempted."""
        self.has_draft_tokens = False
        self.considers_prompts = False
        """Whether prompts could get a share of the step."""
        self._max_prefills = max_prefills
        self._prefills: set[str] = set()
        self._rows: dict[str, ScheduledRow] = {}

    @property
    def rows(self) -> list[ScheduledRow]:
        return list(self._rows.values())

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def computes_prompts(self) -> bool:
        return bool(self._prefills)

    @property
    def has_room_for_prefill(self) -> bool:
        return self.budget > 0 and len(self._prefills) < self._max_prefills

    def prefill_rank(self, request_class: RequestClass) -> tuple[bool, int]:
        """Prompts of classes with smaller ones come first."""
        return request_class.name != self.first_class, request_class.rank

    def add_decode(self, request: Request) -> None:
        """Gives a request that decodes its token; one that has a row already, as it was just admitted, keeps that."""
        if request.request_id not in self._rows:
            row = (request, request.num_computed_tokens, 1, 1, request.num_preemptions)
            self._rows[request.request_id] = tuple.__new__(ScheduledRow, row)  # half of what its own constructor takes
            self.budget -= 1

    def add(self, request: Request, num_tokens: int, *, prefill: bool = False) -> None:
        self._set_row(request, min(num_tokens, self.budget))
        if prefill:
            self._prefills.add(request.request_id)

    def add_draft_tokens(self, request: Request, num_drafts: int) -> None:
        """Has the row of a request that decodes compute so many of its drafts as well."""
        row = self._rows[request.request_id]
        num_drafts = min(num_drafts, self.budget)
        self._rows[request.request_id] = row._replace(query_len=1 + num_drafts, num_samples=1 + num_drafts)
        self.budget -= num_drafts
        self.has_draft_tokens = self.has_draft_tokens or num_drafts > 0

    def extend_row(self, request: Request, num_tokens: int) -> None:
        """Gives a request that has a row what is left of the budget, up to so many tokens."""
        row = self._rows.get(request.request_id)
        if row is not None:  # otherwise it has lost its place since
            self._set_row(request, min(num_tokens, row.query_len + self.budget))

    def remove_row(self, request: Request) -> None:
        """Takes a preempted request's row out again, if it has one."""
        self.changes_running = True
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self.budget += row.query_len
            self._prefills.discard(request.request_id)

    def _set_row(self, request: Request, query_len: int) -> None:
        before = self._rows.get(request.request_id)
        self.budget -= query_len - (0 if before is None else before.query_len)
        start = request.num_computed_tokens
        samples = start + query_len == request.num_tokens and request.sampling.max_tokens > 0
        self._rows[request.request_id] = ScheduledRow(request, start, query_len, int(samples), request.num_preemptions)


def find_blocked(draft: StepPlan, waits: WaitingRequests, places: RunningSlots) -> Blocked | None:
    """Of a step that is formed; None: nobody waits, or nothing is in the way of those who do."""
    full = waits.tenant_limiter.full_tenants()
    if len(waits.queue) == 0:
        return Blocked(None, None, WaitReason.TENANT, full_tenants=full) if full else None
    blocked = _left_in_queue(draft, waits, places)
    return blocked._replace(full_tenants=full) if blocked is not None and full else blocked


def _left_in_queue(draft: StepPlan, waits: WaitingRequests, places: RunningSlots) -> Blocked | None:
    if not draft.considers_prompts:
        return Blocked(None, None, WaitReason.DECODING)
    blocked = draft.blocked
    if blocked is not None and blocked.reason is WaitReason.BATCH:
        return blocked
    if blocked is not None and blocked.reason in NO_ROOM:
        blocked = _or_slots(blocked, waits, places)
    if draft.closed_classes:
        closed = tuple(sorted(draft.closed_classes))
        return (blocked or Blocked(None, None, WaitReason.SHARE))._replace(closed_classes=closed)
    return blocked


def _or_slots(blocked: Blocked, waits: WaitingRequests, places: RunningSlots) -> Blocked:
    """Who would not have been admitted by a step with room either, as no slot is free for it, waits for a slot."""
    assert blocked.class_name is not None
    own = waits.queue.queues[blocked.class_name].request_class
    if not places.is_full or places.has_lower_class(own):
        return blocked
    return blocked._replace(reason=WaitReason.SLOTS, holding_class=places.largest_other_class(own))
