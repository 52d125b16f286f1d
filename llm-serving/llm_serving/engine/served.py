"""What each tenant was served by all replicas, and what of it each replica knows."""

from __future__ import annotations

from collections.abc import Mapping

from llm_serving.scheduler.fair_share import MAX_TENANTS

Service = Mapping[tuple[str, str], int]
"""(class, tenant) -> tokens, as virtual token counters count them."""


class Served:
    """Sums over all replicas, so that telling takes no longer where these are many; not to be called by two at once.

    A replica hears at every step how far all sums are, which is one copy of numbers, and is told what that means for
    each tenant when it needs to know. Lists have a place for each class of a tenant, in the order in which they came
    up; those of a replica may be shorter.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], int] = {}
        self._totals: list[int] = []
        self._num_changes = 0
        self._heard_at: dict[int, int] = {}
        """By replica: how many changes there had been when it heard last."""
        self._heard: dict[int, list[int]] = {}
        """By replica: the sums as they were then, and with what it has served itself since."""
        self._known: dict[int, list[int]] = {}
        """By replica: what of each sum it was told, or has served itself."""

    @property
    def replicas(self) -> set[int]:
        """That it knows of."""
        return {*self._heard}

    def join(self, replica: int) -> None:
        """It is told what comes from here on."""
        self._heard[replica], self._known[replica] = self._totals.copy(), self._totals.copy()
        self._heard_at[replica] = self._num_changes

    def leave(self, replica: int) -> None:
        for by_replica in (self._heard_at, self._heard, self._known):
            by_replica.pop(replica, None)

    def add(self, replica: int, service: Service) -> None:
        """A replica has served these."""
        if len(self._heard) < 2:
            return
        if len(self._totals) > MAX_TENANTS:
            self._forget()
        places, totals = self._places, self._totals
        own = [self._heard[replica], self._known[replica]] if replica in self._heard else []
        for key, num_tokens in service.items():
            if (place := places.get(key)) is None:
                place = places[key] = len(totals)
                totals.append(0)
            totals[place] += num_tokens
            for each in own:
                if place >= len(each):
                    each += [0] * (place + 1 - len(each))
                each[place] += num_tokens
        self._num_changes += 1

    def has_news(self, replica: int) -> bool:
        """Whether anybody has served since the replica heard last; may be called while others are told."""
        return self._heard_at.get(replica) not in (None, self._num_changes)

    def hear(self, replica: int) -> None:
        """The replica is to be told what all have served until now."""
        self._heard[replica], self._heard_at[replica] = self._totals.copy(), self._num_changes

    def take(self, replica: int) -> dict[tuple[str, str], int]:
        """What the others had served when the replica heard last, and it has not been told."""
        heard, known = self._heard.get(replica), self._known.get(replica)
        if heard is None or known is None or heard == known:
            return {}
        known += [0] * (len(heard) - len(known))
        self._known[replica] = heard.copy()
        told = zip(self._places, heard, known, strict=False)
        return {key: total - before for key, total, before in told if total != before}

    def _forget(self) -> None:
        """All goes at once, so that it is seldom; replicas that have not asked for long are not told any more."""
        self._places.clear()
        self._totals.clear()
        for each in (*self._heard.values(), *self._known.values()):
            each.clear()
