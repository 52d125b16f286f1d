"""Running requests give their places up: what is done with what they have computed, and what is told of it.

Who gives way to a waiting request of a higher class.
"""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.fair_sharing import Turns
from llm_serving.scheduler.limits import PreemptionMode, SchedulerLimits
from llm_serving.scheduler.running import Places, worst_first
from llm_serving.scheduler.schedule import Preemption, StepDraft
from llm_serving.scheduler.waiting import Waits


def victims_for(
    request: Request, parent: Request | None, places: Places, turns: Turns, classes: Sequence[RequestClass]
) -> list[Request]:
    """Running requests that make room for the waiting one if they lose their places, as few as will do; maybe none.

    They are paused or of strictly lower classes, and beyond what is the due of those.
    """
    covered = _covered(request.request_class, places, turns, classes)
    victims = [
        other for other in worst_first(places.running) if _yields_to(request, other, places) and other not in covered
    ]
    if not victims or not places.fits(request, parent, victims):
        return []
    for victim in reversed(victims):
        spared = [other for other in victims if other is not victim]
        if places.fits(request, parent, spared):
            victims = spared
    return victims


def _yields_to(request: Request, other: Request, places: Places) -> bool:
    """Whether the running `other` may be displaced by the waiting request, unless its class's share covers it."""
    if other.paused:
        return True
    return request.request_class.rank < other.request_class.rank and not places.is_protected(other)


def _covered(by: RequestClass, places: Places, turns: Turns, classes: Sequence[RequestClass]) -> set[Request]:
    """Running requests of classes below `by` whose places and blocks are those of their own share.

    Those that may not lose their place again are counted first, then those that are first in their order.
    """
    covered: set[Request] = set()
    for each in classes:
        if each.rank <= by.rank or not places.held[each.name]:
            continue
        members = [request for request in places.running if request.request_class is each and not request.paused]
        members.sort(key=lambda request: not places.is_protected(request))
        covered.update(members[: turns.num_covered(each.name, by.name, map(places.num_blocks_of, members))])
    return covered


class GivingWay:
    """Makes room for a request by taking the places of others, as few as will do."""

    def __init__(
        self,
        limits: SchedulerLimits,
        classes: Sequence[RequestClass],
        blocks: BlockManager,
        places: Places,
        waits: Waits,
    ) -> None:
        self._limits = limits
        self._classes = tuple(classes)
        self._blocks = blocks
        self._places = places
        self._waits = waits
        self._preempted: list[Request] = []
        self._preemptions: list[Preemption] = []
        """What is to tell of each of `_preempted`."""

    def take(self) -> tuple[list[Request], list[Preemption]]:
        """Who has lost its place since the last call, once for each time, and what is to tell of each."""
        taken = self._preempted, self._preemptions
        self._preempted, self._preemptions = [], []
        return taken

    def take_over(self, other: GivingWay) -> None:
        """What another has to tell is told here."""
        self._preempted, self._preemptions = other.take()

    def displace_for(self, request: Request, parent: Request | None, draft: StepDraft) -> bool:
        """Whether others have given way to the waiting request, which has room then; otherwise nobody has."""
        victims = victims_for(request, parent, self._places, self._waits.queue.turns, self._classes)
        for victim in victims:
            self.preempt(victim, draft, request)
        return bool(victims)

    def make_room(self, request: Request, draft: StepDraft) -> bool:
        """Makes the request's table hold its newest token, or the window and a step of it.

        The worst running requests give way, itself at last. Protected requests hold all their blocks from the start, or
        as many as they ever need at once and share none: they take only what they give back, and never give way.
        """
        if self._blocks.window.slides:
            self._places.slide(request)
        while not self._places.can_grow(request):
            victim = next(other for other in worst_first(self._places.running) if not self._keeps_its_place(other))
            self.preempt(victim, draft, request)
            if victim is request:
                return False
        self._places.grow(request)
        return True

    def preempt(self, request: Request, draft: StepDraft, cause: Request) -> None:
        """Takes the request's blocks; it waits ahead of its class, until it is brought back or computed again."""
        self._places.leave(request)
        draft.withdraw(request)
        swaps = self._prefers_swap(request) and self._blocks.can_swap_out(request)
        self._preempted.append(request)
        self._preemptions.append(Preemption(request.request_id, cause.request_class.name, swaps))
        if swaps:
            self._blocks.swap_out(request)
        else:
            self._blocks.free(request.request_id)
            request.num_computed_tokens = request.num_confirmed_tokens = 0
        request.num_preemptions += not request.paused
        self._waits.wait_again(request)

    def _keeps_its_place(self, request: Request) -> bool:
        return self._places.is_protected(request) and not request.paused

    def _prefers_swap(self, request: Request) -> bool:
        if self._limits.preemption_mode is not PreemptionMode.AUTO:
            return self._limits.preemption_mode is PreemptionMode.SWAP
        num_blocks = self._blocks.num_blocks_to_swap(request)
        return num_blocks * self._limits.swap_block_cost_tokens < request.num_computed_tokens
