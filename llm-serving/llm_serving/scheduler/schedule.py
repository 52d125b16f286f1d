"""One step: its plan, the resulting schedule, and the waiting request that it could not admit."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.step import BlockMove, StateAccess
from llm_serving.kvcache import BlockManager, StateSlots
from llm_serving.kvcache.transfer_pool import DiskPrefixes, StoredBlocks
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.waiting import WaitingRequests


class WaitReason(enum.StrEnum):
    SLOTS = "no free slot"
    BLOCKS = "no free block"
    BUDGET = "token budget of the step used up"
    PROMPTS = "maximum number of prompts in the step"
    SHARE = "share limit of its class"
    IN_FLIGHT = "its latest token is being computed"
    DECODING = "the step only decodes"
    BATCH = "the static batch is not full"
    TENANT = "concurrency limit of its tenant"
    ADAPTER = "no free adapter slot"


NO_ROOM: Final = (WaitReason.BUDGET, WaitReason.PROMPTS)
"""Reasons that may not hold in the next step: other requests used up the budget of this step."""
FULL: Final = (WaitReason.SLOTS, WaitReason.BLOCKS)
"""Reasons that hold until another request ends."""


class Blocked(NamedTuple):
    """Why the next request of the queue does not fit into a step. All requests behind it wait too."""

    request_id: str | None
    class_name: str | None
    reason: WaitReason
    holding_class: str | None = None
    """The other class that holds the most slots."""
    closed_classes: tuple[str, ...] = ()
    """Classes at their share limit, whose requests the step did not consider."""
    full_tenants: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: Request, reason: WaitReason) -> Blocked:
        return cls(request.request_id, request.request_class.name, reason)


class Preemption(NamedTuple):
    request_id: str
    by_class: str
    swapped: bool


class ScheduledRow(NamedTuple):
    request: Request
    num_computed: int
    query_len: int
    num_samples: int
    """Number of tokens that the step samples: 0 if known tokens remain, else 1 plus the draft tokens."""
    num_preemptions: int
    """`Request.num_preemptions` when the step was formed. If it has grown since, the row's KV is lost."""

    @property
    def end(self) -> int:
        return self.num_computed + self.query_len

    @property
    def num_drafts(self) -> int:
        return max(0, self.num_samples - 1)


class PromptResults(NamedTuple):
    """What a step returns about the prompt of one request: log-probabilities of prompt tokens, or a hidden state."""

    row: int
    start: int
    end: int
    """The step returns the log-probabilities of the tokens that follow the prompt tokens [start, end)."""
    vector: bool
    """Whether the step returns the hidden state of the last prompt token."""
    ends: bool
    """Whether the request finishes with these results, because it asks for no output tokens."""


@dataclass(slots=True)  # creation of a frozen one takes twice as long
class Schedule:
    """A formed step. `Scheduler.schedule` returns it, and `Scheduler.update` applies its results."""

    step: int
    rows: list[ScheduledRow]
    block_moves: list[BlockMove] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    prompt_results: list[PromptResults] = field(default_factory=list)
    has_draft_tokens: bool = False
    migrating: list[ScheduledRow] = field(default_factory=list)
    """Rows whose requests migrate to another replica after the reply, unless the reply finishes the request."""
    exports: list[BlockMove] = field(default_factory=list)
    states: list[StateAccess] = field(default_factory=list)
    stores: Sequence[StoredBlocks] = ()
    """Prompt blocks among `exports` that the disk cache stores after the reply."""
    num_bound_violations: int = 0
    """Number of guaranteed maximum waits and gaps that this step exceeds. Above 0, the scheduler has a bug."""
    num_tokens: int = field(kw_only=True)
    num_samples: int = field(kw_only=True)


class StepPlan:
    def __init__(self, number: int, now: float, budget: int, max_prefills: int) -> None:
        self.number = number
        self.now = now
        """Seconds, by the clock of `Request.arrival_time`."""
        self.budget = budget
        self.closed_classes: set[str] = set()
        self.first_class: str | None = None
        self.blocked: Blocked | None = None
        self.changes_running = False
        self.has_draft_tokens = False
        self.num_samples = 0
        self.considers_prompts = False
        self.rows: dict[str, ScheduledRow] = {}
        self.prefills: set[str] = set()
        self._max_prefills = max_prefills

    @property
    def has_room_for_prefill(self) -> bool:
        return self.budget > 0 and len(self.prefills) < self._max_prefills

    def prefill_rank(self, request_class: RequestClass) -> tuple[bool, int]:
        """Return a sort key of a class: prompts of the class with the smallest key go first."""
        return request_class.name != self.first_class, request_class.rank

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        """Let the step compute the next `num_tokens` tokens of a request, or as many as the token budget allows."""
        before, start = self.rows.get(request.request_id), request.num_computed_tokens
        room = self.budget if before is None else self.budget + before.query_len
        query_len = min(num_tokens, room)
        self.budget = room - query_len
        samples = start + query_len == request.num_tokens and request.sampling.max_tokens > 0
        self.rows[request.request_id] = ScheduledRow(request, start, query_len, int(samples), request.num_preemptions)
        self.prefills.add(request.request_id)

    def add_draft_tokens(self, request: Request, num_drafts: int) -> None:
        row = self.rows[request.request_id]
        num_drafts = min(num_drafts, self.budget)
        self.rows[request.request_id] = row._replace(query_len=1 + num_drafts, num_samples=1 + num_drafts)
        self.budget -= num_drafts
        self.has_draft_tokens = self.has_draft_tokens or num_drafts > 0

    def remove_row(self, request: Request) -> None:
        self.changes_running = True
        row = self.rows.pop(request.request_id, None)
        if row is not None:
            self.budget += row.query_len
            self.prefills.discard(request.request_id)


def find_blocked(plan: StepPlan, waiting_requests: WaitingRequests, slots: RunningSlots) -> Blocked | None:
    full = waiting_requests.tenant_limiter.full_tenants
    if len(waiting_requests.queue) == 0:
        return Blocked(None, None, WaitReason.TENANT, full_tenants=full) if full else None
    blocked = _blocked_in_queue(plan, waiting_requests, slots)
    return blocked._replace(full_tenants=full) if blocked is not None and full else blocked


def _blocked_in_queue(plan: StepPlan, waiting_requests: WaitingRequests, slots: RunningSlots) -> Blocked | None:
    if not plan.considers_prompts:
        return Blocked(None, None, WaitReason.DECODING)
    blocked = plan.blocked
    if blocked is not None and blocked.reason is WaitReason.BATCH:
        return blocked
    if blocked is not None and blocked.reason in NO_ROOM:
        blocked = _or_no_slot(blocked, waiting_requests, slots)
    if plan.closed_classes:
        closed = tuple(sorted(plan.closed_classes))
        return (blocked or Blocked(None, None, WaitReason.SHARE))._replace(closed_classes=closed)
    return blocked


def _or_no_slot(blocked: Blocked, waiting_requests: WaitingRequests, slots: RunningSlots) -> Blocked:
    """Return `blocked`, with the reason SLOTS if all slots are used by the blocked request's class or higher ones."""
    assert blocked.class_name is not None
    own = waiting_requests.queue.queues[blocked.class_name].request_class
    if not slots.is_full or slots.has_lower_class(own):
        return blocked
    return blocked._replace(reason=WaitReason.SLOTS, holding_class=slots.largest_other_class(own))


def collect_prompt_results(rows: Sequence[ScheduledRow]) -> list[PromptResults]:
    """Return what a step must return about the prompts of `rows`, without log-probabilities from earlier steps."""
    results = []
    for index, (request, num_computed, query_len, _, _) in enumerate(rows):
        if not request.has_prompt_results or num_computed >= request.num_prompt_tokens:
            continue
        end = num_computed + query_len
        start = max(num_computed, request.num_prompt_logprobs_received)
        last = min(end, request.num_prompt_logprobs_wanted)
        completes = end >= request.num_prompt_tokens
        vector, ends = completes and request.wants_vector, completes and request.sampling.max_tokens == 0
        if start < last or vector or ends:
            results.append(PromptResults(index, min(start, last), last, vector, ends))
    return results


def plan_exports(rows: Sequence[ScheduledRow], blocks: BlockManager) -> tuple[list[ScheduledRow], list[BlockMove]]:
    """Return the rows whose requests migrate after this step, and the copies of their blocks for the next replica. A
    request migrates after its first token. It stays if this token is also its last, or if the memory for such copies
    (`kvcache.transfer_pool`) is full.
    """
    migrating: list[ScheduledRow] = []
    exports: list[BlockMove] = []
    for row in rows:
        request = row.request
        is_last = request.num_output_tokens + 1 >= request.sampling.max_tokens
        if not request.wants_migration or row.num_samples != 1 or is_last:
            continue
        moves = blocks.export(request.request_id, row.end)
        if moves is not None:
            request.is_migrating = True
            migrating.append(row)
            exports += moves
    return migrating, exports


def plan_stores(
    rows: Sequence[ScheduledRow], blocks: BlockManager, disk: DiskPrefixes, exports: list[BlockMove]
) -> list[StoredBlocks]:
    """Return the prompt blocks of `rows` to store in the disk cache. Append the copies of these blocks to `exports`."""
    stores = []
    for row in rows:
        request = row.request
        if disk.stores(request.request_id):
            table, hashes = blocks.table(request.request_id), blocks.prompt_hashes(request)
            if (stored := disk.store(request, row.end, table, hashes)) is not None:
                stores.append(stored[0])
                exports += stored[1]
    return stores


def plan_states(rows: Sequence[ScheduledRow], states: StateSlots) -> list[StateAccess]:
    for request, _, _, num_samples, _ in rows:
        if num_samples > 1:
            states.add_drafts(request.request_id, num_samples - 1)
    for index, (request, num_computed, query_len, _, _) in enumerate(rows):
        states.add_row(index, request.request_id, num_computed, query_len)
    return states.pop_accesses()


def add_draft_tokens(plan: StepPlan, blocks: BlockManager) -> None:
    """Add draft tokens to a step without prompts, higher classes first. Recurrent models need a state slot for each."""
    if plan.prefills:
        return
    num_left = plan.budget if blocks.states is None else blocks.states.num_spare
    for row in list(plan.rows.values()):
        request = row.request
        if request.draft_token_ids and row.num_samples and row.query_len == 1:
            room = blocks.num_tokens_with_blocks(request.request_id) - row.end
            left = request.sampling.max_tokens - request.num_output_tokens - 1
            plan.add_draft_tokens(request, min(len(request.draft_token_ids), room, left, num_left))
            num_left -= plan.rows[request.request_id].num_drafts


def count_accepted_tokens(draft_token_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """Return how many tokens a step adds to a request: one, and one more for each accepted draft token. A negative id
    in `token_ids` means that the request's constraint allows no token there.
    """
    count = 1
    for chosen, draft, following in zip(token_ids, draft_token_ids, token_ids[1:], strict=False):
        if chosen != draft or following < 0:
            break
        count += 1
    return count
