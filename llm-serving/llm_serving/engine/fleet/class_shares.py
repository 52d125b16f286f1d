"""What each class was served by all replicas, and which classes have unmet demand.

A class that is ahead of its share is deprioritized until the others have caught up.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from llm_serving.scheduler.fair_sharing import ClassUsage

_NOBODY: Final[frozenset[str]] = frozenset()

MOST_TURNS: Final = 4
"""Scheduling quanta that a class can be ahead at most: service that no other class could use does not count against it
for ever."""


class ClassDemand:
    """Counts the replicas at which each class wants more, so that nobody has to look at all of them."""

    def __init__(self) -> None:
        self._names: dict[int, frozenset[str]] = {}
        """By replica."""
        self._counts: Counter[str] = Counter()

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        return {*self._names}

    @property
    def anywhere(self) -> Collection[str]:
        """Those that want more at some replica."""
        return self._counts.keys()

    def tell(self, replica: int, paid: Mapping[str, ClassUsage]) -> None:
        """A replica knows anew who wants more there."""
        names = frozenset([name for name, each in paid.items() if each.has_demand])
        before = self._names.get(replica, _NOBODY)
        self._names[replica] = names
        if names != before:
            self._count(names - before, 1)
            self._count(before - names, -1)

    def leave(self, replica: int) -> None:
        """It serves no longer; twice changes nothing."""
        self._count(self._names.pop(replica, _NOBODY), -1)

    def _count(self, names: Collection[str], change: int) -> None:
        for name in names:
            self._counts[name] += change
            if not self._counts[name]:
                del self._counts[name]


class FleetClassUsage:
    """One for all replicas of a master; each engine's thread tells and asks once a step.

    As in a replica, service is paid in parts of a step over the weight, and counts against those who want more: the
    class that has had least of these is where all begin. One that is a turn ahead of it counts less, until it is ahead
    by no more than half a turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paid: Counter[str] = Counter()
        self._wanting = ClassDemand()
        self._ahead: frozenset[str] = frozenset()
        self._told: dict[int, frozenset[str]] = {}

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        return {*self._wanting.replicas, *self._told}

    def leave(self, replica: int) -> None:
        """A replica serves no longer; the one after it knows of nobody ahead."""
        with self._lock:
            self._wanting.leave(replica)
            self._told.pop(replica, None)

    def charge(self, replica: int, paid: Mapping[str, ClassUsage]) -> None:
        """A replica has formed a step."""
        with self._lock:
            self._wanting.tell(replica, paid)
            for name, each in paid.items():
                self._paid[name] += each.service
            least = min((self._paid[name] for name in self._wanting.anywhere), default=None)
            ahead = set()
            for name, each in paid.items():
                lead = 0 if least is None else min(max(0, self._paid[name] - least), MOST_TURNS * each.quantum)
                self._paid[name] = lead
                if lead > each.quantum or (name in self._ahead and 2 * lead > each.quantum):
                    ahead.add(name)
            self._ahead = frozenset(ahead)

    def take_ahead(self, replica: int) -> frozenset[str] | None:
        """The classes that are ahead; None: the same as when the replica asked before."""
        if self._told.get(replica, frozenset()) == self._ahead:
            return None
        with self._lock:
            self._told[replica] = self._ahead
            return self._ahead


class Extremes:
    """Values at moments that are counted; `since` takes as long however many moments there are between.

    Kept are those values alone that are below, or above, all that came after them: few, as what goes up comes down.
    """

    def __init__(self) -> None:
        self._low_moments: list[int] = []
        self._lows: list[int] = []
        """Both ascending."""
        self._high_moments: list[int] = []
        self._highs: list[int] = []
        """Moments ascending, values descending."""

    def add(self, moment: int, value: int) -> None:
        """It has this value from a moment on, the latest of all."""
        lows, highs = self._lows, self._highs
        if lows and lows[-1] == value:  # the latest is the last of both
            self._low_moments[-1] = self._high_moments[-1] = moment
            return
        while lows and lows[-1] >= value:
            del self._low_moments[-1], lows[-1]
        while highs and highs[-1] <= value:
            del self._high_moments[-1], highs[-1]
        self._low_moments.append(moment)
        self._high_moments.append(moment)
        lows.append(value)
        highs.append(value)

    def since(self, moment: int) -> tuple[int, int]:
        """The least and the most since a moment at which a value was added."""
        least = self._lows[bisect_left(self._low_moments, moment)]
        return least, self._highs[bisect_left(self._high_moments, moment)]
