"""The two stages of a step, prefill and decode, and the bounds on the gaps between the steps of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.fair_sharing import WeightedFairSharing
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.policies import Policy, Preference
from llm_serving.scheduler.preemption import Preemptor
from llm_serving.scheduler.running import RunningSlots, RunningSnapshot
from llm_serving.scheduler.schedule import NO_ROOM, Blocked, ScheduledRow, StepPlan, WaitReason
from llm_serving.scheduler.waiting import WaitingRequests


@dataclass(eq=False)
class DecodeStage:
    """Gives running requests their next token, and decides whether a step begins with decoding or prefill."""

    _max_prefill_gap: int
    _policy: Policy
    _blocks: BlockManager
    _sharing: WeightedFairSharing
    _preemptor: Preemptor
    _max_prompt_gaps: Mapping[str, int]
    """`ClassBounds.max_prompt_gap` of each class."""
    num_steps_without_prefill: int = field(default=0, init=False)
    """Number of consecutive steps that computed no prompt although one waited."""

    def schedule(self, plan: StepPlan, running: RunningSnapshot) -> None:
        block_size, rows = self._blocks.block_size, plan.rows
        new_row = tuple.__new__  # half the cost of calling ScheduledRow
        for request in running.decoding:
            if plan.budget == 0:
                return
            if request.status is not RUNNING:
                continue
            start = request.num_computed_tokens
            # A table always holds what is computed, so only the first token of a block may need a new block.
            if (start % block_size or self._preemptor.ensure_blocks(request, plan)) and request.request_id not in rows:
                rows[request.request_id] = new_row(ScheduledRow, (request, start, 1, 1, request.num_preemptions))
                plan.budget -= 1

    def preference(self, running: RunningSnapshot, has_prompts: bool, step: int) -> Preference:
        """Return the stage that the step begins with: the policy's choice, unless a bound on gaps forbids it."""
        preference = self._policy.prefer(running.num_decoding, prompts_wait=has_prompts)
        last = running.least_scheduled_step
        gap = 0 if last is None else step - 1 - last
        if gap >= self._policy.max_decode_gap or (gap > 0 and self._exceeds_class_gap(running.decoding, step - 1)):
            return Preference.DECODE_FIRST
        if has_prompts and self.num_steps_without_prefill >= self._max_prefill_gap:
            return Preference.PREFILL_FIRST
        return preference

    def _exceeds_class_gap(self, decoding: Sequence[Request], last_step: int) -> bool:
        names = {request.request_class.name for request in decoding}
        gaps = {name: self._sharing.max_decode_gap(name) for name in names}
        return any(
            (gap := gaps[each.request_class.name]) is not None and last_step - each.last_scheduled_step >= gap
            for each in decoding
        )

    def count_gap_violations(self, plan: StepPlan, running: RunningSnapshot, has_prompts: bool) -> int:
        """Update `num_steps_without_prefill` after a step was formed. Return how many running requests have been left
        out of more consecutive steps than their bound allows. `running` is the snapshot from before the step.
        """
        self.num_steps_without_prefill = 0 if plan.prefills or not has_prompts else self.num_steps_without_prefill + 1
        last = plan.number
        for request in running.decoding:
            if request.last_scheduled_step < last and request.status is RUNNING:
                last = request.last_scheduled_step
        num_violations = int(plan.number - last > self._policy.max_decode_gap)
        for request in running.prefilling:
            gap = plan.number - max(request.last_scheduled_step, request.class_change_step)
            is_too_late = gap == self._max_prompt_gaps[request.request_class.name] + 1
            num_violations += request.status is RUNNING and is_too_late
        return num_violations


@dataclass(eq=False)
class PrefillStage:
    """Computes incomplete prompts and admits waiting requests, by the rank of their class or by fair sharing."""

    _limits: SchedulerLimits
    _blocks: BlockManager
    _slots: RunningSlots
    _waiting_requests: WaitingRequests
    _preemptor: Preemptor
    _requests: Mapping[str, Request]

    def schedule(self, plan: StepPlan, running: RunningSnapshot) -> None:
        """Fill the step with prompts. `running`: the snapshot before this stage."""
        plan.considers_prompts = True
        admits = not (self._limits.static_batching and self._slots.running)
        if not running.prefilling and not len(self._waiting_requests.queue):  # most steps: no prompt waits
            if admits:
                self._waiting_requests.queue.update_contenders((), self._slots.slots_by_class)
            return
        waits_for_a_batch = self._limits.batch_waiting_time > 0.0 and self.batch_wait_s(plan.now) > 0.0
        if waits_for_a_batch:
            plan.closed_classes.update(self._waiting_requests.queue.queues)
        capped: list[Request] = []
        plan.first_class = self._first_class(running.prefilling, plan)
        prompts = running.prefilling
        if len(prompts) > 1:
            prompts = sorted(prompts, key=lambda each: plan.prefill_rank(each.request_class))
        for request in prompts:
            if admits:
                self._admit(plan, capped, before=request.request_class)
            if not plan.has_room_for_prefill:
                break
            if request.status is RUNNING:
                self._schedule_prefill(request, plan, capped)
        if admits:
            self._admit(plan, capped)
        if waits_for_a_batch or not admits:
            plan.blocked = Blocked(None, None, WaitReason.BATCH)
        for request in capped:
            if request.status is RUNNING and request.request_id in plan.rows:  # it may have been preempted
                plan.add_prefill(request, self._num_computable(request))

    def batch_wait_s(self, now: float) -> float:
        """Return how many more seconds admission waits for a full batch. Return 0 if there is no reason to wait."""
        limits, queue = self._limits, self._waiting_requests.queue
        if limits.batch_waiting_time == 0.0 or len(queue) == 0:
            return 0.0
        full = limits.max_num_seqs if limits.static_batching else limits.max_prefill_seqs
        if len(queue) >= full:
            return 0.0
        oldest = min(request.arrival_time for request in queue)
        return max(0.0, limits.batch_waiting_time - (now - oldest))

    def parent_of(self, request: Request) -> Request | None:
        if request.fork_of is None:
            return None
        parent = self._requests.get(request.fork_of)
        return parent if parent is not None and parent.status is RUNNING else None

    def unserved_classes(self, plan: StepPlan) -> set[str]:
        """Return the classes with a prompt that the step leaves out because its token budget is used up."""
        running = self._slots.running
        prompts = [request for request in running if request.num_uncomputed_tokens and not request.is_decoding]
        unserved = {request.request_class.name for request in prompts}
        blocked = plan.blocked
        if blocked is not None and blocked.reason in NO_ROOM and blocked.class_name is not None:
            unserved.add(blocked.class_name)
        return unserved

    def estimate_tokens(self, request: Request) -> int:
        """Return how many prompt tokens must be computed before the first token of a waiting request, if it is next.
        Cached tokens do not count. If a running request computes the same prefix now, only the part that it has not
        computed yet counts.
        """
        num_tokens = request.num_tokens
        estimate = num_tokens - self._blocks.num_prefix_hit_tokens(request)
        parent = self._requests.get(request.fork_of or "")
        running = self._slots.running
        for other in running if parent is None else (parent, *running):
            if other.num_prompt_tokens <= other.num_confirmed_tokens:
                continue
            common = other.num_prompt_tokens if other is parent else self._blocks.num_common_tokens(request, other)
            estimate = min(estimate, num_tokens - common + max(0, common - other.num_confirmed_tokens))
        return max(1, estimate)

    def _first_class(self, prompts: list[Request], plan: StepPlan) -> str | None:
        queue, closed = self._waiting_requests.queue, plan.closed_classes
        names, aged = set(), set()
        for request in prompts:
            request_class = request.request_class
            names.add(request_class.name)
            if plan.number - request.running_since[0] >= request_class.ageing_steps:
                aged.add(request_class.name)
        for name, each in queue.queues.items():
            if len(each) and name not in closed:
                names.add(name)
        if len(names) < 2:
            return None
        queue.update_contenders(closed, self._slots.slots_by_class, aged)
        return queue.sharing.next_prefill_class(names)

    def _admit(self, plan: StepPlan, capped: list[Request], before: RequestClass | None = None) -> None:
        """Admit waiting requests until one does not fit. `before`: admit only classes that go before this one."""
        slots, queue = self._slots, self._waiting_requests.queue
        plan.blocked = None
        while (request := queue.peek(plan.closed_classes, slots.slots_by_class, slots.blocks_by_class)) is not None:
            request_class = request.request_class
            if before is not None and plan.prefill_rank(request_class) >= plan.prefill_rank(before):
                return
            if slots.is_at_limit(request, request_class):
                plan.closed_classes.add(request_class.name)
                continue
            if not plan.has_room_for_prefill and not self._limits.static_batching:
                plan.blocked = Blocked.of(request, WaitReason.PROMPTS if plan.budget else WaitReason.BUDGET)
                return
            # The latest token of a preempted request is still unknown, or the reply that finishes a request without
            # output is missing.
            if request.num_tokens_in_flight or not request.num_uncomputed_tokens:
                plan.blocked = Blocked.of(request, WaitReason.IN_FLIGHT)
                return
            if self._limits.whole_prompts and request.num_tokens > plan.budget:
                plan.blocked = Blocked.of(request, WaitReason.BUDGET)
                return
            adapters = self._blocks.adapters if request.adapter else None
            if adapters is not None and adapters.waits_for_a_step(request, plan.number):
                plan.blocked = Blocked.of(request, WaitReason.ADAPTER)
                return
            parent = self.parent_of(request)
            if not (slots.has_room_for(request, parent) or self._preemptor.preempt_for(request, parent, plan)):
                reason = WaitReason.SLOTS if slots.is_full else WaitReason.BLOCKS
                if reason is WaitReason.BLOCKS and adapters is not None and not adapters.has_room_for(request):
                    reason = WaitReason.ADAPTER
                blocked = Blocked.of(request, reason)
                plan.blocked = blocked._replace(holding_class=slots.largest_other_class(request_class))
                return
            self._start(request, plan)
            if plan.has_room_for_prefill:
                self._schedule_prefill(request, plan, capped)

    def _start(self, request: Request, plan: StepPlan) -> None:
        plan.changes_running = True
        self._waiting_requests.record_admission(request)
        parent = self.parent_of(request)
        slots = self._slots
        num_tokens, is_protected = slots.num_tokens_to_allocate(request), slots.is_protected(request)
        num_found = self._blocks.admit(request, num_tokens, parent, guaranteed=is_protected)
        if self._blocks.disk is not None:
            num_found = self._blocks.import_from_disk(request, num_found)
        if request.num_computed_tokens == 0:  # otherwise its blocks are swapped in or imported
            request.num_computed_tokens = request.num_confirmed_tokens = num_found
        if request.first_scheduled_time is None:
            # A fork's shared prefix was computed for parent and fork together, so it is no cache hit.
            request.num_cached_tokens = num_found if parent is None else parent.num_cached_tokens
        request.status = RUNNING
        request.running_since = (plan.number, plan.now)
        request.last_scheduled_step = plan.number - 1  # its wait does not count as a gap
        slots.add(request)

    def _schedule_prefill(self, request: Request, plan: StepPlan, capped: list[Request]) -> None:
        """Add at most `max_long_prefill_tokens` tokens of a prompt. If more fit, append the request to `capped`."""
        if self._limits.whole_prompts:
            if request.num_tokens <= plan.budget:
                plan.add_prefill(request, request.num_tokens)
            return
        if self._blocks.has_sliding_window and not self._preemptor.ensure_blocks(request, plan):
            return
        share = self._limits.max_long_prefill_tokens or plan.budget
        num_tokens = self._num_computable(request)
        if min(num_tokens, plan.budget) > share:
            capped.append(request)
        plan.add_prefill(request, min(num_tokens, share))

    def _num_computable(self, request: Request) -> int:
        if not self._blocks.has_sliding_window:
            return request.num_uncomputed_tokens
        room = self._blocks.num_tokens_with_blocks(request.request_id) - request.num_computed_tokens
        return min(request.num_uncomputed_tokens, room)
