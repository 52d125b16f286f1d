"""Who gives way to a waiting request of a higher class."""

from __future__ import annotations

from collections.abc import Sequence

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.scheduler.places import Places, worst_first
from llm_serving.scheduler.turns import Turns


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
