"""Running requests give their places up: what is done with what they have computed, and what is told of it.

Who gives way to a waiting request of a higher class.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.fair_sharing import WeightedFairSharing
from llm_serving.scheduler.limits import PreemptionMode, SchedulerLimits
from llm_serving.scheduler.running import RunningSlots, preemption_order
from llm_serving.scheduler.schedule import Preemption, StepPlan
from llm_serving.scheduler.waiting import WaitingRequests


def find_victims(
    request: Request,
    parent: Request | None,
    places: RunningSlots,
    turns: WeightedFairSharing,
    classes: Sequence[RequestClass],
) -> list[Request]:
    """Running requests that make room for the waiting one if they lose their places, as few as will do; maybe none.

    They are paused or of strictly lower classes, and beyond what is the due of those.
    """
    covered = _covered(request.request_class, places, turns, classes)
    victims = [
        other
        for other in preemption_order(places.running)
        if _yields_to(request, other, places) and other not in covered
    ]
    if not victims or not places.has_room_for(request, parent, victims):
        return []
    for victim in reversed(victims):
        spared = [other for other in victims if other is not victim]
        if places.has_room_for(request, parent, spared):
            victims = spared
    return victims


def _yields_to(request: Request, other: Request, places: RunningSlots) -> bool:
    """Whether the running `other` may be displaced by the waiting request, unless its class's share covers it."""
    if other.paused:
        return True
    return request.request_class.rank < other.request_class.rank and not places.is_protected(other)


def _covered(
    by: RequestClass, places: RunningSlots, turns: WeightedFairSharing, classes: Sequence[RequestClass]
) -> set[Request]:
    """Running requests of classes below `by` whose places and blocks are those of their own share.

    Those that may not lose their place again are counted first, then those that are first in their order.
    """
    covered: set[Request] = set()
    for each in classes:
        if each.rank <= by.rank or not places.slots_by_class[each.name]:
            continue
        members = [request for request in places.running if request.request_class is each and not request.paused]
        members.sort(key=lambda request: not places.is_protected(request))
        covered.update(members[: turns.num_entitled(each.name, by.name, map(places.num_blocks_of, members))])
    return covered


class Preemptor:
    """Makes room for a request by taking the places of others, as few as will do."""

    def __init__(
        self,
        limits: SchedulerLimits,
        classes: Sequence[RequestClass],
        blocks: BlockManager,
        places: RunningSlots,
        waits: WaitingRequests,
    ) -> None:
        self._limits = limits
        self._classes = tuple(classes)
        self._blocks = blocks
        self._slots = places
        self._waiting_requests = waits
        self._preempted: list[Request] = []
        self._preemptions: list[Preemption] = []
        """What is to tell of each of `_preempted`."""

    def pop_preempted(self) -> tuple[list[Request], list[Preemption]]:
        """Who has lost its place since the last call, once for each time, and what is to tell of each."""
        taken = self._preempted, self._preemptions
        self._preempted, self._preemptions = [], []
        return taken

    def adopt(self, other: Preemptor) -> None:
        """What another has to tell is told here."""
        self._preempted, self._preemptions = other.pop_preempted()

    def preempt_for(self, request: Request, parent: Request | None, draft: StepPlan) -> bool:
        """Whether others have given way to the waiting request, which has room then; otherwise nobody has."""
        victims = find_victims(request, parent, self._slots, self._waiting_requests.queue.sharing, self._classes)
        for victim in victims:
            self.preempt(victim, draft, request)
        return bool(victims)

    def ensure_blocks(self, request: Request, draft: StepPlan) -> bool:
        """Makes the request's table hold its newest token, or the window and a step of it.

        The worst running requests give way, itself at last. Protected requests hold all their blocks from the start, or
        as many as they ever need at once and share none: they take only what they give back, and never give way.
        """
        if self._blocks.window.is_sliding:
            self._slots.free_outside_window(request)
        while not self._slots.can_grow(request):
            victim = next(other for other in preemption_order(self._slots.running) if not self._keeps_slot(other))
            self.preempt(victim, draft, request)
            if victim is request:
                return False
        self._slots.grow(request)
        return True

    def preempt(self, request: Request, draft: StepPlan, cause: Request) -> None:
        """Takes the request's blocks; it waits ahead of its class, until it is brought back or computed again."""
        self._slots.remove(request)
        draft.remove_row(request)
        swaps = self._prefers_swap(request) and self._blocks.can_swap_out(request)
        self._preempted.append(request)
        self._preemptions.append(Preemption(request.request_id, cause.request_class.name, swaps))
        if swaps:
            self._blocks.swap_out(request)
        else:
            self._blocks.free(request.request_id)
            request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.num_preemptions += not request.paused
        self._waiting_requests.requeue(request)

    def _keeps_slot(self, request: Request) -> bool:
        return self._slots.is_protected(request) and not request.paused

    def _prefers_swap(self, request: Request) -> bool:
        if self._limits.preemption_mode is not PreemptionMode.AUTO:
            return self._limits.preemption_mode is PreemptionMode.SWAP
        num_blocks = self._blocks.num_blocks_to_swap(request)
        return num_blocks * self._limits.swap_block_cost_tokens < request.num_computed_tokens
