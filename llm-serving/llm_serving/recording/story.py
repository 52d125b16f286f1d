"""What a scheduler decided, step after step, in a form to be looked at: who ran, who waited, and what for."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from llm_serving.core.request import Request
from llm_serving.scheduler.schedule import Schedule
from llm_serving.scheduler.scheduler import Scheduler

MAX_STEPS: Final = 2000
"""The newest; a page of more is slow to open."""
MAX_WAITING: Final = 64
"""Waiting requests that are told of a step; the others are counted."""


class ToldRequest(msgspec.Struct, array_like=True):
    id: str
    request_class: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_time: float


class ToldStep(msgspec.Struct, array_like=True):
    """A decision, and everybody's place after it. Requests are called by their place in the list of all."""

    number: int
    time: float
    rows: list[tuple[int, int, int, int]]
    """(request, first token computed, tokens computed, tokens chosen)."""
    running: list[tuple[int, int]]
    """(request, blocks), in the order in which they decode."""
    waiting: list[int]
    """Whoever goes first, first; at most `MAX_WAITING`."""
    num_waiting: int
    preempted: list[tuple[int, str, bool]]
    """(request, the class it was done for, whether what it had computed was moved out)."""
    next: int | None
    """Who was to be admitted next, and was not."""
    reason: str
    """Why; empty: nobody was kept waiting."""
    behind: str | None
    """Class that holds most of the places the reason is about."""
    closed: tuple[str, ...]
    """Classes that hold as much as they may."""
    num_used_blocks: int


class ToldStory(msgspec.Struct):
    name: str
    version: str
    """Of the package that recorded."""
    slots: int
    budget: int
    """Tokens of a step."""
    blocks: int
    block_size: int
    requests: list[ToldRequest]
    steps: list[ToldStep]
    num_left_out: int
    """Steps before these."""


class Story:
    """Listens to a replay: `decided` is told of each step.

    Args:
        scheduler: That decides.
        most_steps: That are kept, the newest.
    """

    def __init__(self, scheduler: Scheduler, most_steps: int = MAX_STEPS) -> None:
        self._scheduler = scheduler
        self._steps: deque[ToldStep] = deque(maxlen=most_steps)
        self._num_steps = 0
        self._requests: dict[int, ToldRequest] = {}

    def decided(self, schedule: Schedule, now: float) -> None:
        scheduler, blocked = self._scheduler, self._scheduler.blocked
        first = heapq.nsmallest(MAX_WAITING, scheduler.waiting, key=_place)
        first += islice(scheduler.kept_apart(), MAX_WAITING - len(first))
        live = scheduler._requests
        ahead = live.get(blocked.request_id or "") if blocked is not None else None
        self._num_steps += 1
        self._steps.append(
            ToldStep(
                schedule.step,
                now,
                [(self._who(row.request), row.num_computed, row.query_len, row.samples) for row in schedule.rows],
                [(self._who(each), scheduler.blocks.num_blocks_held(each.request_id)) for each in scheduler.running],
                [self._who(each) for each in first],
                scheduler.num_waiting,
                [
                    (self._who(request), each.by_class, each.swapped)
                    for request, each in zip(schedule.preempted, schedule.preemptions, strict=True)
                ],
                None if ahead is None else self._who(ahead),
                "" if blocked is None else blocked.reason.value,
                None if blocked is None else blocked.behind,
                () if blocked is None else blocked.closed,
                scheduler.blocks.pool.num_used_blocks,
            )
        )

    def told(self, name: str, version: str) -> ToldStory:
        """All of it, with the requests that its steps name."""
        pool = self._scheduler.blocks.pool
        places: dict[int, int] = {}
        steps = [_renumbered(step, places) for step in self._steps]
        return ToldStory(
            name,
            version,
            self._scheduler.limits.max_num_seqs,
            self._scheduler.limits.max_num_batched_tokens,
            pool.num_blocks,
            self._scheduler.blocks.block_size,
            [self._requests[sequence] for sequence in places],
            steps,
            self._num_steps - len(steps),
        )

    def _who(self, request: Request) -> int:
        if request.sequence not in self._requests:
            self._requests[request.sequence] = ToldRequest(
                request.request_id,
                request.request_class.name,
                request.tenant,
                request.num_prompt_tokens,
                request.sampling.max_tokens,
                request.arrival_time,
            )
        return request.sequence


def _place(request: Request) -> tuple[Any, ...]:
    return request.request_class.rank, not request.has_run, request.queue_key


def _renumbered(step: ToldStep, places: dict[int, int]) -> ToldStep:
    """With places in the list of those that are named in place of `Request.sequence`."""

    def place(sequence: int) -> int:
        return places.setdefault(sequence, len(places))

    changes: Mapping[str, Any] = {
        "rows": [(place(who), *rest) for who, *rest in step.rows],
        "running": [(place(who), blocks) for who, blocks in step.running],
        "waiting": [place(who) for who in step.waiting],
        "preempted": [(place(who), *rest) for who, *rest in step.preempted],
        "next": None if step.next is None else place(step.next),
    }
    return msgspec.structs.replace(step, **changes)
