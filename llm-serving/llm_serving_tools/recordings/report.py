"""Reports of a recording: a scheduler's state and decisions as text, and all steps as data for the replay page."""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec
from llm_serving.core.request import Request
from llm_serving.core.step import BlockMoveKind
from llm_serving.scheduler.schedule import Schedule, WaitReason
from llm_serving.scheduler.scheduler import Scheduler

MAX_SHOWN: Final = 20

_HEADINGS: Final = ("request", "class", "computed", "of", "blocks", "preemptions")
MAX_STEPS: Final = 2000
"""Maximum number of steps on a page: the latest, because a browser opens a larger page slowly."""
MAX_WAITING: Final = 64


def describe_state(scheduler: Scheduler) -> str:
    pool, host_pool = scheduler.blocks.pool, scheduler.blocks.host_pool
    lines = [
        f"before step {scheduler._step}: {len(scheduler.running)} of {scheduler.limits.max_num_seqs} slots run,"
        f" {scheduler.num_waiting} requests wait",
        f"blocks: {pool.num_used_blocks} of {pool.num_blocks} used, {pool.num_cached_blocks} hold prefixes that can be"
        f" found; host pool: {host_pool.num_used_blocks} of {host_pool.num_blocks} used",
        "",
        "running, in the order in which they decode",
        *_table(_HEADINGS, [_cells(scheduler, request) for request in scheduler.running]),
    ]
    chosen = _next(scheduler)
    for name, queue in scheduler.waiting.queues.items():
        if not len(queue):
            continue
        head = queue.peek()
        members = sorted(queue, key=lambda each: (each is not head, not each.has_run, each.queue_key))
        lines += ["", f"waiting in class {name}: {len(members)}"]
        cells = [(*_cells(scheduler, request), "next" if request is chosen else "") for request in members[:MAX_SHOWN]]
        lines += _table((*_HEADINGS, ""), cells)
        if len(members) > MAX_SHOWN:
            lines.append(f"  and {len(members) - MAX_SHOWN} more")
    forks = [fork for forks in scheduler.waiting_requests.forks.values() for fork in forks]
    held = list(scheduler.held_by_tenant_limits())
    others = (
        ("waiting for their parent's prompt", forks),
        ("waiting because of their tenant's limit", held[:MAX_SHOWN]),
        ("paused", scheduler.waiting_requests.paused),
    )
    for title, requests in others:
        if requests:
            lines += ["", title, *_table(_HEADINGS, [_cells(scheduler, request) for request in requests])]
    return "\n".join(lines)


def describe_decision(schedule: Schedule) -> str:
    cells = [
        (
            row.request.request_id,
            f"{row.num_computed} to {row.end - 1}",
            str(row.query_len),
            "samples" if row.num_samples else "",
            "for the first time" if row.request in schedule.started else "",
        )
        for row in schedule.rows
    ]
    moves = ", ".join(f"{BlockMoveKind(move.kind).name} {move.source}->{move.target}" for move in schedule.block_moves)
    return "\n".join(
        [
            f"step {schedule.step} computes {schedule.num_tokens} tokens",
            *_table(("request", "tokens", "count", "", ""), cells),
            f"  block moves: {moves or 'none'}",
            f"  preempted: {', '.join(request.request_id for request in schedule.preempted) or 'none'}",
        ]
    )


def describe_waiting(scheduler: Scheduler, schedule: Schedule) -> str:
    """Return a text that says why requests still wait after the step, with counts of slots, blocks and tokens."""
    blocked = scheduler.blocked
    if blocked is None:
        return "no request waits for admission"
    heads = (scheduler.waiting.queues[name].peek() for name in blocked.closed_classes)
    lines = [f"{head.request_id} waits: {_share(scheduler, head)}" for head in heads if head is not None]
    request = scheduler.find(blocked.request_id)
    if request is None:
        if blocked.reason is not WaitReason.SHARE:
            lines.append(f"all wait: {blocked.reason}")
    else:
        numbers = _numbers(scheduler, request, blocked.reason, schedule)
        lines.append(f"next is {request.request_id}; it waits: {blocked.reason}{numbers}")
    return "\n".join(lines)


def _numbers(scheduler: Scheduler, request: Request, reason: WaitReason, schedule: Schedule) -> str:
    limits, num_running = scheduler.limits, len(scheduler.running)
    match reason:
        case WaitReason.SLOTS:
            return f"; {num_running} of {limits.max_num_seqs} are in use"
        case WaitReason.BLOCKS:
            num_needed = scheduler.slots.num_blocks_to_admit(request, scheduler.prefill.parent_of(request))
            num_free = scheduler.blocks.pool.num_free_blocks
            return f"; it needs {num_needed}, {num_running} are reserved for running requests, {num_free} are free"
        case WaitReason.BUDGET | WaitReason.PROMPTS:
            num_prompts = sum(row.num_computed < row.request.num_prompt_tokens for row in schedule.rows)
            return (
                f"; the step has {schedule.num_tokens} of {limits.max_num_batched_tokens} tokens"
                f" and {num_prompts} of {limits.max_prefill_seqs} prompts"
            )
    return ""


def _share(scheduler: Scheduler, request: Request) -> str:
    share = request.request_class
    members = [other for other in scheduler.running if other.request_class is share]
    num_held = sum(scheduler.blocks.num_blocks_held(member.request_id) for member in members)
    num_needed = scheduler.blocks.max_blocks_of(scheduler.slots.num_tokens_to_allocate(request))
    return (
        f"{WaitReason.SHARE}: {share.name} has {len(members)} of the"
        f" {share.max_running_share * scheduler.limits.max_num_seqs:g} slots and {num_held} of the"
        f" {share.max_kv_share * scheduler.blocks.pool.num_blocks:g} blocks it may have; {num_needed} more are needed"
    )


def _next(scheduler: Scheduler) -> Request | None:
    closed: set[str] = set()
    waiting = copy.copy(scheduler.waiting)
    waiting.sharing = copy.deepcopy(waiting.sharing)  # `peek` changes the contenders
    while (request := waiting.peek(closed, scheduler.slots_by_class, scheduler.slots.blocks_by_class)) is not None:
        if not scheduler.slots.is_at_limit(request, request.request_class):
            break
        closed.add(request.request_class.name)
    return request


def _cells(scheduler: Scheduler, request: Request) -> tuple[str, ...]:
    num_blocks = scheduler.blocks.num_blocks_held(request.request_id)
    in_flight = f" ({request.num_tokens_in_flight} in flight)" if request.num_tokens_in_flight else ""
    return (
        request.request_id,
        request.request_class.name,
        str(request.num_computed_tokens),
        f"{request.num_tokens}{in_flight}",
        "swapped" if scheduler.blocks.is_swapped(request.request_id) else str(num_blocks),
        str(request.num_preemptions),
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return ["  none"]
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (headings, *rows))
    return [f"  {line}".rstrip() for line in lines]


class ReplayedRequest(msgspec.Struct, array_like=True):
    id: str
    request_class: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_time: float


class ReplayedStep(msgspec.Struct, array_like=True):
    """Decisions in a step, and the state after it. Requests are indices into `ReplayPageData.requests`."""

    number: int
    time: float
    rows: list[tuple[int, int, int, int]]
    """(request, index of the first token computed, number of tokens computed, number of tokens sampled)."""
    running: list[tuple[int, int]]
    """(request, number of blocks), in decode order."""
    waiting: list[int]
    num_waiting: int
    preempted: list[tuple[int, str, bool]]
    """(request, class that needed its blocks, whether its blocks were swapped out)."""
    next: int | None
    reason: str
    """Why `next` could not be admitted. Empty if no request waits."""
    behind: str | None
    """Class that holds the most slots or the most blocks, depending on which of them `next` lacks."""
    closed: tuple[str, ...]
    num_used_blocks: int


class ReplayPageData(msgspec.Struct):
    name: str
    version: str
    slots: int
    budget: int
    blocks: int
    block_size: int
    requests: list[ReplayedRequest]
    steps: list[ReplayedStep]
    num_left_out: int


class ReplayPageBuilder:
    def __init__(self, scheduler: Scheduler, max_steps: int = MAX_STEPS) -> None:
        self._scheduler = scheduler
        self._steps: deque[ReplayedStep] = deque(maxlen=max_steps)
        self._num_steps = 0
        self._requests: dict[int, ReplayedRequest] = {}

    def add_step(self, schedule: Schedule, now: float) -> None:
        """Add a step that the scheduler has just decided at time `now`, in seconds on the recording's clock."""
        scheduler, blocked = self._scheduler, self._scheduler.blocked
        first = heapq.nsmallest(MAX_WAITING, scheduler.waiting, key=_admission_order)
        first += islice(scheduler.held_by_tenant_limits(), MAX_WAITING - len(first))
        add, live = self._add_request, scheduler._requests
        ahead = live.get(blocked.request_id or "") if blocked is not None else None
        self._num_steps += 1
        self._steps.append(
            ReplayedStep(
                schedule.step,
                now,
                [(add(row.request), row.num_computed, row.query_len, row.num_samples) for row in schedule.rows],
                [(add(each), scheduler.blocks.num_blocks_held(each.request_id)) for each in scheduler.running],
                [add(each) for each in first],
                scheduler.num_waiting,
                [
                    (add(request), each.by_class, each.swapped)
                    for request, each in zip(schedule.preempted, schedule.preemptions, strict=True)
                ],
                None if ahead is None else add(ahead),
                "" if blocked is None else blocked.reason.value,
                None if blocked is None else blocked.holding_class,
                () if blocked is None else blocked.closed_classes,
                scheduler.blocks.pool.num_used_blocks,
            )
        )

    def page_data(self, name: str, version: str) -> ReplayPageData:
        pool = self._scheduler.blocks.pool
        indices: dict[int, int] = {}
        steps = [_renumbered(step, indices) for step in self._steps]
        return ReplayPageData(
            name,
            version,
            self._scheduler.limits.max_num_seqs,
            self._scheduler.limits.max_num_batched_tokens,
            pool.num_blocks,
            self._scheduler.blocks.block_size,
            [self._requests[sequence] for sequence in indices],
            steps,
            self._num_steps - len(steps),
        )

    def _add_request(self, request: Request) -> int:
        if request.sequence not in self._requests:
            self._requests[request.sequence] = ReplayedRequest(
                request.request_id,
                request.request_class.name,
                request.tenant,
                request.num_prompt_tokens,
                request.sampling.max_tokens,
                request.arrival_time,
            )
        return request.sequence


def _admission_order(request: Request) -> tuple[Any, ...]:
    return request.request_class.rank, not request.has_run, request.queue_key


def _renumbered(step: ReplayedStep, indices: dict[int, int]) -> ReplayedStep:
    def index_of(sequence: int) -> int:
        return indices.setdefault(sequence, len(indices))

    changes: Mapping[str, Any] = {
        "rows": [(index_of(sequence), *rest) for sequence, *rest in step.rows],
        "running": [(index_of(sequence), blocks) for sequence, blocks in step.running],
        "waiting": [index_of(sequence) for sequence in step.waiting],
        "preempted": [(index_of(sequence), *rest) for sequence, *rest in step.preempted],
        "next": None if step.next is None else index_of(step.next),
    }
    return msgspec.structs.replace(step, **changes)
