"""Service received by each tenant of a class: whoever got least goes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
"""

from __future__ import annotations

from typing import Final

OUTPUT_TOKEN_WEIGHT: Final = 2
"""What a generated token counts, against one for a computed prompt token; the paper's choice."""
MAX_TENANTS: Final = 10_000
"""Counters that are kept."""


class FairShare:
    """One counter a tenant; tokens that are computed again after a preemption count again.

    Whoever has had least is forgotten where there are too many: it gains the least by starting anew.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        """What a tenant that comes back is lifted to: idle time is no credit."""
        self._last_to_leave: str | None = None

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, self._floor)

    def charge(self, tenant: str, num_tokens: int) -> None:
        served = self._served  # nothing is called: a step of one of many replicas charges all who were served elsewhere
        served[tenant] = served.get(tenant, self._floor) + num_tokens
        if len(served) > MAX_TENANTS:
            self._forget()

    def join(self, tenant: str, least_waiting: int | None) -> None:
        """The tenant begins to wait; `least_waiting` is the least counter among those that wait already.

        Where nobody does, it starts from the counter of the last one that did.
        """
        if least_waiting is None and self._last_to_leave is not None:
            least_waiting = self.served(self._last_to_leave)
        self._floor = max(self._floor, least_waiting or 0)
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > MAX_TENANTS:
            self._forget()

    def leave(self, tenant: str) -> None:
        """The tenant waits no longer."""
        self._last_to_leave = tenant

    def _forget(self) -> None:
        """Half of them go at once, so that it is seldom."""
        most_last = sorted(self._served, key=self._served.__getitem__)
        kept = most_last[-(MAX_TENANTS // 2) :]
        self._served = {name: self._served[name] for name in kept if self._served[name] > self._floor}
