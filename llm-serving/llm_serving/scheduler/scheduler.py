"""The decision of every step: which requests compute how many tokens, and who gives way when blocks run out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.policy import Policy
from llm_serving.scheduler.request_queue import RequestQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and one batch may hold."""

    max_num_batched_tokens: int
    """Token budget of a step, prompts and decoding together; at least `max_num_seqs`."""
    max_num_seqs: int
    """Most running requests."""
    max_prefill_seqs: int
    """Most prompts (or parts of prompts) in one step."""
    max_decode_gap: int
    """Most steps in a row that may leave a decoding request out."""
    max_preemptions: int = 8
    """Times a request may lose its blocks; after that it is admitted with all it can ever need, and keeps it."""
    static_batching: bool = False
    """Admit a new batch only when the one before it has ended: the baseline for comparisons."""
    batch_waiting_time: float = 0.0
    """Seconds to wait after the first arrival for a batch to fill."""


class ScheduledRow(NamedTuple):
    """One request's share of a step."""

    request: Request
    num_computed: int
    """Tokens in the cache before the step."""
    query_len: int
    """Tokens this step computes."""
    samples: bool
    """Whether they complete the known tokens, so that a next one is chosen."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What `schedule` decided; `update` takes it back with the tokens that came of it."""

    step: int
    rows: list[ScheduledRow]
    num_preempted: int
    """Since the schedule before this one."""
    num_bound_violations: int
    """Decoding requests left out for longer than the bound allows; 0 unless the scheduler has a fault."""

    @property
    def num_tokens(self) -> int:
        return sum(row.query_len for row in self.rows)


class Scheduler:
    """Continuous batching over one key/value cache.

    One rule covers prompts, chunks of prompts, decoding and the return of preempted requests: bring
    `num_computed_tokens` up to `num_tokens`. The policy decides who gets the step's token budget first.

    `schedule` may run one step ahead of the results: it counts the tokens that submitted steps will sample
    (`Request.num_tokens_in_flight`). A WorkAgent runs steps strictly in order, so a block freed here may be given away
    at once: whatever a submitted step still does with it happens before the next owner's first write.
    """

    def __init__(self, limits: SchedulerLimits, policy: Policy, blocks: BlockManager) -> None:
        self.limits = limits
        self.policy = policy
        self.blocks = blocks
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        """Sorted by `queue_key`."""
        self._step = 0
        self._sequence = 0
        self._num_preempted = 0

    def add(self, request: Request) -> None:
        """Queues a request that passed the checks at the door."""
        request.sequence = self._sequence
        self._sequence += 1
        request.queue_key = self.policy.queue_key(request, self._step)
        self.waiting.push(request)

    def schedule(self, now: float) -> Schedule | None:
        """Forms the next step; None when no request can move.

        Args:
            now: Seconds on the clock of `Request.arrival_time`.
        """
        step = _Step(self._step, self.limits.max_num_batched_tokens)
        stages: list[Callable[[_Step], None]] = [self._schedule_decodes]
        prefill_first = self.policy.prefill_goes_first(self._decode_gap())
        stages.insert(0 if prefill_first else 1, lambda step: self._schedule_prefills(step, now))
        for stage in stages:
            stage(step)
        self._num_preempted += step.num_preempted
        if not step.rows:
            return None
        for row in step.rows.values():
            self._advance(row, now)
        self._step += 1
        violations = int(self._decode_gap() > self.limits.max_decode_gap)
        num_preempted, self._num_preempted = self._num_preempted, 0
        return Schedule(step.number, list(step.rows.values()), num_preempted, violations)

    def update(self, schedule: Schedule, token_ids: list[int]) -> list[Request]:
        """Applies the tokens that a step sampled, one for each of its sampling rows in order.

        Returns:
            The requests that got a token, in row order; those that ended before the result came are left out.
        """
        sampling_rows = [row for row in schedule.rows if row.samples]
        assert len(sampling_rows) == len(token_ids), f"{len(token_ids)} tokens for {len(sampling_rows)} samples"
        updated = []
        for row, token_id in zip(sampling_rows, token_ids, strict=True):
            request = row.request
            if request.is_finished:
                continue
            request.num_tokens_in_flight -= 1
            request.output_token_ids.append(token_id)
            if token_id in request.stop_token_ids:
                explicit = token_id in request.sampling.stop_token_ids
                self.finish(request, FinishReason.STOP, token_id if explicit else None)
            elif len(request.output_token_ids) >= request.sampling.max_tokens:
                self.finish(request, FinishReason.LENGTH)
            updated.append(request)
        return updated

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a request in whatever state it is; its blocks are free at once. Ending it twice changes nothing."""
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.discard(request)
        self.blocks.free(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def bounds(self) -> str:
        """What a request can be made to wait for, as the limits have it."""
        gap, preemptions = self.limits.max_decode_gap, self.limits.max_preemptions
        return (
            f"a running request is left out of at most {gap} steps in a row and preempted at most {preemptions} times"
        )

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def check_integrity(self) -> None:
        """Raises AssertionError when a block or a request is in a place where it cannot be."""
        self.blocks.check_integrity()
        assert len(self.running) <= self.limits.max_num_seqs
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        assert all(not self.blocks.block_table(request.request_id) for request in self.waiting)
        keys = [request.queue_key for request in self.running]
        assert keys == sorted(keys)

    # --- one step ---------------------------------------------------------------------------------------------------

    def _schedule_decodes(self, step: _Step) -> None:
        for request in list(self.running):
            if step.budget == 0:
                return
            if request.status is not RequestStatus.RUNNING or not request.is_decoding or request.reached_max_tokens:
                continue
            if self._make_room(request, step):
                step.add(request, 1)

    def _schedule_prefills(self, step: _Step, now: float) -> None:
        """Running prompts that are not complete and waiting ones, in one order."""
        admits = self._admission_is_open(now)
        for request in [other for other in self.running if other.num_uncomputed_tokens > 0 and not other.is_decoding]:
            if admits:
                self._admit(step, before=request.queue_key)
            if not step.has_room_for_prefill(self.limits):
                return
            step.add(request, request.num_uncomputed_tokens, prefill=True)
        if admits:
            self._admit(step)

    def _admit(self, step: _Step, before: tuple[int, int] | None = None) -> None:
        """Moves waiting requests to running, best first; the first that does not fit ends it, none overtakes it.

        With `before`, only those that stand before this place in the order.
        """
        while (request := self.waiting.peek()) is not None and (before is None or request.queue_key < before):
            # A preempted request whose newest token is still on the device cannot be computed yet.
            fits = len(self.running) < self.limits.max_num_seqs and request.num_tokens_in_flight == 0
            num_tokens = request.max_num_tokens if self._is_protected(request) else request.num_tokens
            if not fits or not self.blocks.can_admit(num_tokens, reserve=len(self.running)):
                return
            has_room = step.has_room_for_prefill(self.limits)
            if not has_room and not self.limits.static_batching:
                return
            self.waiting.pop()
            self.blocks.grow(request.request_id, num_tokens)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_queue_key)
            if has_room:
                step.add(request, request.num_tokens, prefill=True)

    def _admission_is_open(self, now: float) -> bool:
        if len(self.waiting) == 0 or (self.limits.static_batching and self.running):
            return False
        if self.limits.batch_waiting_time == 0.0:
            return True
        full = self.limits.max_num_seqs if self.limits.static_batching else self.limits.max_prefill_seqs
        oldest = min(request.arrival_time for request in self.waiting)
        return len(self.waiting) >= full or now - oldest >= self.limits.batch_waiting_time

    def _make_room(self, request: Request, step: _Step) -> bool:
        """Makes the request's table hold its newest token; the worst running requests give way, itself at last.

        Protected requests hold all their blocks from the start: they never come here for more, and never give way.
        """
        while not self.blocks.can_grow(request.request_id, request.num_tokens):
            victim = next(other for other in reversed(self.running) if not self._is_protected(other))
            self._preempt(victim, step)
            if victim is request:
                return False
        self.blocks.grow(request.request_id, request.num_tokens)
        return True

    def _preempt(self, request: Request, step: _Step) -> None:
        """Takes the request's blocks; it waits at its old place in the order and is computed again."""
        self.running.remove(request)
        step.withdraw(request)
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.waiting.push(request)

    def _is_protected(self, request: Request) -> bool:
        return request.num_preemptions >= self.limits.max_preemptions

    def _advance(self, row: ScheduledRow, now: float) -> None:
        request = row.request
        request.num_computed_tokens += row.query_len
        request.num_tokens_in_flight += row.samples
        request.last_scheduled_step = self._step
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now

    def _decode_gap(self) -> int:
        """Steps in a row that left out the decoding request which has waited longest."""
        last = (r.last_scheduled_step for r in self.running if r.is_decoding and not r.reached_max_tokens)
        return self._step - 1 - min(last, default=self._step - 1)


class _Step:
    """A step while it is being formed."""

    def __init__(self, number: int, budget: int) -> None:
        self.number = number
        self.budget = budget
        self.rows: dict[str, ScheduledRow] = {}
        self.num_prefills = 0
        self.num_preempted = 0

    def has_room_for_prefill(self, limits: SchedulerLimits) -> bool:
        return self.budget > 0 and self.num_prefills < limits.max_prefill_seqs

    def add(self, request: Request, num_tokens: int, *, prefill: bool = False) -> None:
        query_len = min(num_tokens, self.budget)
        samples = request.num_computed_tokens + query_len == request.num_tokens
        self.rows[request.request_id] = ScheduledRow(request, request.num_computed_tokens, query_len, samples)
        self.budget -= query_len
        self.num_prefills += prefill

    def withdraw(self, request: Request) -> None:
        """Takes a preempted request's row out again, if it has one."""
        self.num_preempted += 1
        row = self.rows.pop(request.request_id, None)
        if row is not None:
            self.budget += row.query_len


def _queue_key(request: Request) -> tuple[int, int]:
    return request.queue_key
