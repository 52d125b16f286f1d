"""What each tenant was served by all replicas, and what of it each replica has not been told."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

from llm_serving.scheduler.fair_share import MAX_TENANTS

Service = Mapping[tuple[str, str], int]
"""(class, tenant) -> tokens, as virtual token counters count them."""


class Served:
    """Sums over all replicas, so that telling takes no longer where these are many; not to be called by two at once.

    A replica is told what has grown since it asked before, but for its own part: so asking takes as long as others have
    served classes of tenants since.
    """

    def __init__(self) -> None:
        self._totals: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """(tokens, number of the latest change), the latest last."""
        self._num_changes = 0
        self._known: dict[int, Counter[tuple[str, str]]] = {}
        """By replica: what of each sum it was told, or has served itself."""
        self._told_at: dict[int, int] = {}
        """By replica: the number of the latest change that it was told of."""

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        return {*self._told_at}

    def join(self, replica: int) -> None:
        """It is told what comes from here on."""
        self._known[replica] = Counter({key: total for key, (total, _) in self._totals.items()})
        self._told_at[replica] = self._num_changes

    def leave(self, replica: int) -> None:
        self._known.pop(replica, None)
        self._told_at.pop(replica, None)

    def add(self, replica: int, service: Service) -> None:
        """A replica has served these."""
        if len(self._told_at) < 2:
            return
        totals, known = self._totals, self._known.get(replica)
        for key, num_tokens in service.items():
            self._num_changes += 1
            total, _ = totals.get(key, (0, 0))
            totals[key] = total + num_tokens, self._num_changes
            totals.move_to_end(key)
            if known is not None:
                known[key] += num_tokens
        if len(totals) > MAX_TENANTS:
            self._forget()

    def has_news(self, replica: int) -> bool:
        """Whether anybody has served since the replica asked before; may be called while others are told."""
        return self._told_at.get(replica) not in (None, self._num_changes)

    def take(self, replica: int) -> dict[tuple[str, str], int]:
        """What the others have served since the last call."""
        since, known = self._told_at[replica], self._known[replica]
        self._told_at[replica] = self._num_changes
        service = {}
        for key, (total, change) in reversed(self._totals.items()):
            if change <= since:
                break
            if num_tokens := total - known[key]:
                service[key], known[key] = num_tokens, total
        return service

    def _forget(self) -> None:
        """Half of the tenants go at once, so that it is seldom: those that have been served by nobody for longest."""
        for _ in range(len(self._totals) // 2):
            key, _ = self._totals.popitem(last=False)
            for known in self._known.values():
                known.pop(key, None)
