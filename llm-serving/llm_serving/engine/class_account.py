"""What each class has had of all replicas: who is ahead of its share counts less until the others have caught up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from llm_serving.engine.wanting import Wanting
from llm_serving.scheduler.turns import Paid

MOST_TURNS: Final = 4
"""That a class can be ahead: what it had because nobody else could take it is not held against it for ever."""


class ClassAccount:
    """One for all replicas of a master; each engine's thread tells and asks once a step.

    As in a replica, service is paid in parts of a step over the weight, and counts against those who want more: the
    class that has had least of these is where all begin. One that is a turn ahead of it counts less, until it is ahead
    by no more than half a turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paid: Counter[str] = Counter()
        self._wanting = Wanting()
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

    def charge(self, replica: int, paid: Mapping[str, Paid]) -> None:
        """A replica has formed a step."""
        with self._lock:
            self._wanting.tell(replica, paid)
            for name, each in paid.items():
                self._paid[name] += each.service
            least = min((self._paid[name] for name in self._wanting.anywhere), default=None)
            ahead = set()
            for name, each in paid.items():
                lead = 0 if least is None else min(max(0, self._paid[name] - least), MOST_TURNS * each.turn)
                self._paid[name] = lead
                if lead > each.turn or (name in self._ahead and 2 * lead > each.turn):
                    ahead.add(name)
            self._ahead = frozenset(ahead)

    def take_ahead(self, replica: int) -> frozenset[str] | None:
        """The classes that are ahead; None: the same as when the replica asked before."""
        if self._told.get(replica, frozenset()) == self._ahead:
            return None
        with self._lock:
            self._told[replica] = self._ahead
            return self._ahead
