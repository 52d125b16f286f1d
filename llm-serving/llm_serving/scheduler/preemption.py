"""Preemption: which running requests lose their slots and blocks, and whether their KV cache is swapped out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.limits import PreemptionMode, SchedulerLimits
from llm_serving.scheduler.running import RunningSlots, preemption_order
from llm_serving.scheduler.schedule import Preemption, StepPlan
from llm_serving.scheduler.waiting import WaitingRequests


@dataclass(eq=False)
class Preemptor:
    _limits: SchedulerLimits
    _classes: Sequence[RequestClass]
    _blocks: BlockManager
    _slots: RunningSlots
    _waiting_requests: WaitingRequests
    preempted: list[Request] = field(default_factory=list, init=False)
    """Requests preempted since the last `pop_preempted`. A request preempted twice is listed twice."""
    _preemptions: list[Preemption] = field(default_factory=list, init=False)

    def pop_preempted(self) -> tuple[list[Request], list[Preemption]]:
        popped = self.preempted, self._preemptions
        self.preempted, self._preemptions = [], []
        return popped

    def adopt(self, other: Preemptor) -> None:
        self.preempted, self._preemptions = other.pop_preempted()

    def preempt_for(self, request: Request, parent: Request | None, plan: StepPlan) -> bool:
        """Preempt requests to make room for `request`, a fork of `parent` if given. Return False if that fails."""
        victims = self._find_victims(request, parent)
        for victim in victims:
            self.preempt(victim, plan, request)
        return bool(victims)

    def ensure_blocks(self, request: Request, plan: StepPlan) -> bool:
        """Allocate the blocks for a running request's next step. If too few are free, preempt other requests. Return
        False if the request itself was preempted. This never happens to a protected request.
        """
        if self._blocks.has_sliding_window:
            self._slots.free_outside_window(request)
        while not self._slots.grow(request):
            candidates = preemption_order(self._slots.running)
            victim = next(other for other in candidates if other.paused or not self._slots.is_protected(other))
            self.preempt(victim, plan, request)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, plan: StepPlan, cause: Request) -> None:
        """Free a request's slot and blocks, because `cause` needs the room. Queue the request ahead of new ones."""
        self._slots.remove(request)
        plan.remove_row(request)
        swaps = self._prefers_swap(request) and self._blocks.can_swap_out(request)
        self.preempted.append(request)
        self._preemptions.append(Preemption(request.request_id, cause.request_class.name, swaps))
        if swaps:
            self._blocks.swap_out(request)
        else:
            self._blocks.free(request.request_id)
            request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.num_preemptions += not request.paused
        self._waiting_requests.requeue(request)

    def _find_victims(self, request: Request, parent: Request | None) -> list[Request]:
        """Return a minimal set of running requests whose preemption makes room for `request`, or an empty list."""
        slots = self._slots
        entitled = self._entitled(request.request_class)
        candidates = preemption_order(slots.running)
        victims = [other for other in candidates if self._can_preempt(request, other) and other not in entitled]
        if not victims or not slots.has_room_for(request, parent, victims):
            return []
        for victim in reversed(victims):
            spared = [other for other in victims if other is not victim]
            if slots.has_room_for(request, parent, spared):
                victims = spared
        return victims

    def _can_preempt(self, request: Request, other: Request) -> bool:
        if other.paused:
            return True
        return request.request_class.rank < other.request_class.rank and not self._slots.is_protected(other)

    def _entitled(self, by: RequestClass) -> set[Request]:
        slots, sharing = self._slots, self._waiting_requests.queue.sharing
        entitled: set[Request] = set()
        for each in self._classes:
            if each.rank <= by.rank or not slots.slots_by_class[each.name]:
                continue
            members = [request for request in slots.running if request.request_class is each and not request.paused]
            members.sort(key=lambda request: not slots.is_protected(request))
            num_blocks = [self._blocks.num_blocks_held(request.request_id) for request in members]
            entitled.update(members[: sharing.num_entitled(each.name, by.name, num_blocks)])
        return entitled

    def _prefers_swap(self, request: Request) -> bool:
        if self._limits.preemption_mode is not PreemptionMode.AUTO:
            return self._limits.preemption_mode is PreemptionMode.SWAP
        num_blocks = self._blocks.num_blocks_to_swap(request)
        return num_blocks * self._limits.swap_block_cost_tokens < request.num_computed_tokens
