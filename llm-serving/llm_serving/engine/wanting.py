"""Which classes want more, at any of the replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from llm_serving.scheduler.turns import Paid

_NOBODY: Final[frozenset[str]] = frozenset()


class Wanting:
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

    def tell(self, replica: int, paid: Mapping[str, Paid]) -> None:
        """A replica knows anew who wants more there."""
        names = frozenset([name for name, each in paid.items() if each.wants])
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
