"""Orders of admission within a class, and the virtual token counters of fair sharing among tenants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from llm_serving.core.enums import OrderName
from llm_serving.core.request import Request

MEMORY: Final = 16
"""Time constant, in requests, of the moving average of output lengths."""
MAX_TENANTS: Final = 10_000
PROMPT_TOKENS_A_STEP: Final = 64
"""Assumed number of prompt tokens that take as long as one decode step."""
NO_DEADLINE_S: Final = 86_400.0
"""Assumed seconds from arrival to deadline for a request without a deadline whose class has no SLO."""
OUTPUT_TOKEN_WEIGHT: Final = 2
"""Virtual tokens of a generated token; a computed prompt token counts 1 (see `TenantTokenCounters`)."""


class Order(Protocol):
    """Order of a class's waiting requests. One of every `max_overtakes` + 1 admissions takes the oldest instead."""

    shares_fairly: bool
    """Whether the tenant with the least service goes first. If so, `sort_key` orders the requests of one tenant."""

    def sort_key(self, request: Request) -> float:
        """Return the sort key; the smallest goes first. Requests with equal keys go by arrival, shifted by priority."""

    @property
    def record_finished(self) -> Callable[[Request], None] | None:
        """Callback that receives each finished request to learn its length. None: the order ignores lengths."""


class ArrivalOrder:
    """First come, first served."""

    shares_fairly = False
    record_finished = None

    def sort_key(self, request: Request) -> float:
        del request
        return 0.0


class FairOrder:
    """The tenant with the least service goes first, with its requests in order of arrival."""

    shares_fairly = True
    record_finished = None
    sort_key = ArrivalOrder.sort_key


class ShortestOrder:
    """Shortest job first, by the mean output length of the tenant's requests in the class, at most `max_tokens`."""

    shares_fairly = False

    def __init__(self) -> None:
        self._mean_lengths: dict[tuple[str, str], float] = {}

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
    """Earliest deadline first (Liu and Layland 1973). The default deadline is arrival plus the class's TTFT SLO."""

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
    """Virtual token counters of a class's tenants. The waiting tenant with the smallest counter goes next.

    Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Recomputed tokens count again.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._floor = 0
        """Lower bound of the counter of a tenant that begins to wait."""
        self._last_to_leave: str | None = None

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, self._floor)

    def charge(self, tenant: str, num_tokens: int) -> None:
        served = self._served  # no method call: one step may charge the service of many replicas
        served[tenant] = served.get(tenant, self._floor) + num_tokens
        if len(served) > MAX_TENANTS:
            self._evict()

    def join(self, tenant: str, least_waiting: int | None) -> None:
        """Record that a tenant begins to wait. Raise its counter to `least_waiting`, the minimum of the waiting
        tenants, so that idle time earns no credit. `least_waiting` is None if no tenant waits.
        """
        if least_waiting is None and self._last_to_leave is not None:
            least_waiting = self.served(self._last_to_leave)
        self._floor = max(self._floor, least_waiting or 0)
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > MAX_TENANTS:
            self._evict()

    def leave(self, tenant: str) -> None:
        self._last_to_leave = tenant

    def _evict(self) -> None:
        """Drop the counters of the tenants with the least service, until half of `MAX_TENANTS` remain."""
        most_last = sorted(self._served, key=self._served.__getitem__)
        kept = most_last[-(MAX_TENANTS // 2) :]
        self._served = {name: self._served[name] for name in kept if self._served[name] > self._floor}
