"""The prompts of a step: who goes on with one, who gets a place for one, and how many tokens of each are computed.

The running requests at the moment before a step, told apart by what they need of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.limits import SchedulerLimits
from llm_serving.scheduler.preemption import Preemptor
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.schedule import Blocked, StepPlan, WaitReason
from llm_serving.scheduler.waiting import WaitingRequests


class RunningSnapshot:
    """One look at every running request; it holds until one comes, goes or is computed.

    The numbers of a request are worked out here once for all who decide: requests are many, and steps are short.
    """

    __slots__ = ("decoding", "least_scheduled_step", "num_decoding", "prefilling")

    def __init__(self, requests: Iterable[Request]) -> None:
        self.decoding: list[Request] = []
        """Those that could get a token now."""
        self.prefilling: list[Request] = []
        """Those with more than the newest token left to compute, in the order in which they were admitted."""
        self.num_decoding = 0
        """Requests that have their prompt behind them, with or without a token to get now."""
        self.least_scheduled_step: int | None = None
        """Of `decoding`, the step that computed the one that has waited longest; None without any."""
        for request in requests:
            in_flight = request.num_tokens_in_flight
            num_output = len(request.output_token_ids) + in_flight
            num_uncomputed = len(request.prompt_token_ids) + num_output - request.num_computed_tokens
            if num_uncomputed == 1 and num_output:
                if request.paused:
                    continue
                self.num_decoding += 1
                if num_output < request.sampling.max_tokens and not (
                    request.is_migrating or (in_flight and (request.needs_known_output or request.draft_token_ids))
                ):
                    self.decoding.append(request)
            elif num_uncomputed > 0:
                self.prefilling.append(request)
        if len(self.prefilling) > 1:
            self.prefilling.sort(key=_admission)
        if self.decoding:
            self.least_scheduled_step = min([request.last_scheduled_step for request in self.decoding])


def _admission(request: Request) -> int:
    return request.admission_number


class PrefillStage:
    """Running prompts that are not complete and waiting ones, higher classes first; long ones leave some room."""

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        places: RunningSlots,
        waits: WaitingRequests,
        giving_way: Preemptor,
        requests: Mapping[str, Request],
    ) -> None:
        """`requests`: all that have not ended, by id; forks find their parents among them."""
        self._limits = limits
        self._blocks = blocks
        self._slots = places
        self._waiting_requests = waits
        self._preemptor = giving_way
        self._requests = requests

    def schedule(self, draft: StepPlan, running: RunningSnapshot) -> None:
        """Gives the prompts what the step has room for; `running`: those that run before it does."""
        draft.considers_prompts = True
        admits = not (self._limits.static_batching and self._slots.running)
        waits_for_a_batch = self.batch_wait_s(draft.now) > 0.0
        if waits_for_a_batch:
            draft.closed_classes.update(self._waiting_requests.queue.queues)
        capped: list[Request] = []
        draft.first_class = self._first_class(running.prefilling, draft)
        for request in sorted(running.prefilling, key=lambda each: draft.prefill_rank(each.request_class)):
            if admits:
                self._admit(draft, capped, before=request.request_class)
            if not draft.has_room_for_prefill:
                break
            if request.status is RUNNING:
                self._schedule_prefill(request, draft, capped)
        if admits:
            self._admit(draft, capped)
        if waits_for_a_batch or not admits:
            draft.blocked = Blocked(None, None, WaitReason.BATCH)
        for request in capped:
            if request.status is RUNNING:
                draft.extend_row(request, self._num_computable(request))

    def batch_wait_s(self, now: float) -> float:
        """Seconds for which those who wait do so for a batch to fill; 0: they do not."""
        limits, queue = self._limits, self._waiting_requests.queue
        if limits.batch_waiting_time == 0.0 or len(queue) == 0:
            return 0.0
        full = limits.max_num_seqs if limits.static_batching else limits.max_prefill_seqs
        if len(queue) >= full:
            return 0.0
        oldest = min(request.arrival_time for request in queue)
        return max(0.0, limits.batch_waiting_time - (now - oldest))

    def parent_of(self, request: Request) -> Request | None:
        """The running request whose blocks this one can share."""
        parent = self._requests.get(request.fork_of or "")
        return parent if parent is not None and parent.status is RUNNING else None

    def _first_class(self, prompts: list[Request], draft: StepPlan) -> str | None:
        """The class whose prompts come first, if several contend: the one that has paid least."""
        queue, closed = self._waiting_requests.queue, draft.closed_classes
        names = {request.request_class.name for request in prompts}
        names.update(name for name, each in queue.queues.items() if len(each) and name not in closed)
        if len(names) > 1:
            queue.update_contenders(closed, self._slots.slots_by_class, _late(prompts, draft.number))
        return queue.sharing.next_prefill_class(names)

    def _admit(self, draft: StepPlan, capped: list[Request], before: RequestClass | None = None) -> None:
        """Moves waiting requests to running, best first; the first that does not fit ends it, none overtakes it.

        With `before`, only those of classes whose prompts come before.
        """
        places, queue = self._slots, self._waiting_requests.queue
        draft.blocked = None
        while (request := queue.peek(draft.closed_classes, places.slots_by_class, places.blocks_by_class)) is not None:
            request_class = request.request_class
            if before is not None and draft.prefill_rank(request_class) >= draft.prefill_rank(before):
                return
            if places.is_at_limit(request, request_class):
                draft.closed_classes.add(request_class.name)
                continue
            if not draft.has_room_for_prefill and not self._limits.static_batching:
                draft.blocked = Blocked.of(request, WaitReason.PROMPTS if draft.budget else WaitReason.BUDGET)
                return
            # A preempted request whose newest token is still on the device cannot be computed yet, and one whose prompt
            # was all it had needs nothing but the reply.
            if request.num_tokens_in_flight or not request.num_uncomputed_tokens:
                draft.blocked = Blocked.of(request, WaitReason.IN_FLIGHT)
                return
            parent = self.parent_of(request)
            if not (places.has_room_for(request, parent) or self._preemptor.preempt_for(request, parent, draft)):
                blocked = Blocked.of(request, WaitReason.SLOTS if places.is_full else WaitReason.BLOCKS)
                draft.blocked = blocked._replace(holding_class=places.largest_other_class(request_class))
                return
            self._start(request, draft)
            if draft.has_room_for_prefill:
                self._schedule_prefill(request, draft, capped)

    def _start(self, request: Request, draft: StepPlan) -> None:
        draft.changes_running = True
        self._waiting_requests.record_admission(request)
        parent = self.parent_of(request)
        num_found = self._slots.allocate_blocks(request, parent)
        if request.num_computed_tokens == 0:  # otherwise it comes back from the host pool
            request.num_computed_tokens = request.num_confirmed_tokens = num_found
        if request.first_scheduled_time is None:
            # What a fork takes from its parent was computed for the two of them, not found.
            request.num_cached_tokens = num_found if parent is None else parent.num_cached_tokens
        request.status = RUNNING
        request.running_since = (draft.number, draft.now)
        request.last_scheduled_step = draft.number - 1  # the steps before have not left it out
        self._slots.add(request)

    def _schedule_prefill(self, request: Request, draft: StepPlan, capped: list[Request]) -> None:
        """Gives the prompt its share of the step; what it could take beyond that is decided when all have theirs."""
        if self._blocks.window.is_sliding and not self._preemptor.ensure_blocks(request, draft):
            return
        share = self._limits.max_long_prefill_tokens or draft.budget
        num_tokens = self._num_computable(request)
        if min(num_tokens, draft.budget) > share:
            capped.append(request)
        draft.add(request, min(num_tokens, share), prefill=True)

    def _num_computable(self, request: Request) -> int:
        """Tokens left to compute that its table has room for: all of them where nothing slides."""
        room = self._blocks.num_tokens_with_blocks(request.request_id) - request.num_computed_tokens
        return min(request.num_uncomputed_tokens, room)


def _late(prompts: Collection[Request], step: int) -> set[str]:
    """Classes with a prompt that has had a place for so long that they yield to no other until it is computed."""
    return {
        each.request_class.name for each in prompts if step - each.running_since[0] >= each.request_class.ageing_steps
    }
