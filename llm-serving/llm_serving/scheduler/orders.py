"""Orders: which request of a class is admitted next, and the virtual token counters of fair sharing among tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from llm_serving.core.enums import OrderName
from llm_serving.core.request import Request

MEMORY: Final = 16
"""Number of finished requests of a tenant after which a request has weight 1/e."""
MAX_TENANTS: Final = 10_000
PROMPT_TOKENS_A_STEP: Final = 64
"""Number of prompt tokens that delay other requests as much as one decode step. Prompt tokens are
computed many at a time.
"""
NO_DEADLINE_S: Final = 86_400.0
"""Seconds from arrival to the assumed deadline of a request without a deadline, if its class has no SLO."""
OUTPUT_TOKEN_WEIGHT: Final = 2
"""Service of a generated token, relative to a computed prompt token, as in the paper."""


class Order(Protocol):
    """Sorts the waiting requests of a class.

    An order never affects a bound on waiting: of `max_overtakes` + 1 admissions of a class, one is its oldest request.
    """

    shares_fairly: bool
    """Whether the tenant with the least service goes first. The sort key then orders the requests of one tenant."""

    def sort_key(self, request: Request) -> float:
        """Return the sort key, smaller first. Ties are broken by arrival, shifted by priority.

        The scheduler calls it on arrival, and again after a reload.
        """

    @property
    def record_finished(self) -> Callable[[Request], None] | None:
        """Learns from the length of a finished request; None if the order does not depend on lengths."""


class ArrivalOrder:
    """First come, first served."""

    shares_fairly = False
    record_finished = None

    def sort_key(self, request: Request) -> float:
        del request
        return 0.0


class FairOrder:
    """The tenant with the least service goes first; its requests in order of arrival."""

    shares_fairly = True
    record_finished = None
    sort_key = ArrivalOrder.sort_key


class ShortestOrder:
    """Shortest job first, which gives the lowest mean wait.

    A request's predicted length is the mean of its tenant and class, at most its `max_tokens`.
    """

    shares_fairly = False

    def __init__(self) -> None:
        self._mean_lengths: dict[tuple[str, str], float] = {}
        """(class, tenant) -> mean output tokens; the most recently updated `MAX_TENANTS` are kept."""

    def sort_key(self, request: Request) -> float:
        most = request.sampling.max_tokens
        mean = self._mean_lengths.get((request.request_class.name, request.tenant), float(most))
        return min(mean, most) + request.num_prompt_tokens / PROMPT_TOKENS_A_STEP

    def record_finished(self, request: Request) -> None:
        length = len(request.output_token_ids)
        if not length:
            return
        key = (request.request_class.name, request.tenant)
        mean = self._mean_lengths.pop(key, float(length))
        self._mean_lengths[key] = mean + (length - mean) / MEMORY
        if len(self._mean_lengths) > MAX_TENANTS:
            del self._mean_lengths[next(iter(self._mean_lengths))]


class DeadlineOrder:
    """Earliest deadline first (Liu and Layland 1973): the request's own deadline, else its class's SLO for the TTFT."""

    shares_fairly = False
    record_finished = None

    def sort_key(self, request: Request) -> float:
        if request.deadline is not None:
            return request.deadline
        slo_s = request.request_class.ttft_slo_s
        return request.arrival_time + (NO_DEADLINE_S if slo_s is None else slo_s)


ORDERS: Final[dict[str, Callable[[], Order]]] = {
    OrderName.FAIR: FairOrder,
    OrderName.ARRIVAL: ArrivalOrder,
    OrderName.SHORTEST: ShortestOrder,
    OrderName.DEADLINE: DeadlineOrder,
}


class TenantTokenCounters:
    """Virtual token counters of the tenants of a class. The waiting tenant with the smallest counter goes next.

    See Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Tokens that are recomputed after a
    preemption count again. Above `MAX_TENANTS`, the tenants with the least service are dropped, because they gain least
    from a new counter.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        """Minimum counter of a tenant that begins to wait, so that idle time earns no credit."""
        self._last_to_leave: str | None = None

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, self._floor)

    def charge(self, tenant: str, num_tokens: int) -> None:
        served = self._served  # no method call: one step may charge the service of many replicas
        served[tenant] = served.get(tenant, self._floor) + num_tokens
        if len(served) > MAX_TENANTS:
            self._evict()

    def join(self, tenant: str, least_waiting: int | None) -> None:
        """Raise the counter of a tenant that begins to wait to the minimum among waiting tenants.

        `least_waiting` is None if no tenant waits. Then the counter of the tenant that stopped waiting last is used.
        """
        if least_waiting is None and self._last_to_leave is not None:
            least_waiting = self.served(self._last_to_leave)
        self._floor = max(self._floor, least_waiting or 0)
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > MAX_TENANTS:
            self._evict()

    def leave(self, tenant: str) -> None:
        """Record that the tenant has no more waiting requests."""
        self._last_to_leave = tenant

    def _evict(self) -> None:
        """Drop half of the tenants at once, so that it is rarely needed."""
        most_last = sorted(self._served, key=self._served.__getitem__)
        kept = most_last[-(MAX_TENANTS // 2) :]
        self._served = {name: self._served[name] for name in kept if self._served[name] > self._floor}
