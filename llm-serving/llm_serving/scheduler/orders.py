"""What an order is: numbers.

First come, first served; `priority` moves a request by a limited number of steps.

The tenant served least goes next; its requests in order of arrival.

Shortest job first, by predicted length: the least mean wait.

Earliest deadline first (Liu and Layland 1973).

Who of a class goes next: one file an order, one line here.

Service received by each tenant of a class: whoever got least goes next.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from llm_serving.core.enums import OrderName
from llm_serving.core.request import Request


class Order(Protocol):
    """A key over numbers. It decides who goes next, never for how long somebody waits: of `max_overtakes` + 1 requests
    of a class that are admitted, one is the oldest, whatever the keys say."""

    shares_fairly: bool
    """Whether the tenant that was served least goes before the others; the key orders the requests of one tenant."""

    def sort_key(self, request: Request) -> float:
        """Smaller goes first; of equals the one that came first, moved by its priority. Asked on arrival, and
        again when the rules of the scheduler change."""

    def record_finished(self, request: Request) -> None:
        """A request has ended: what there is to learn from its length."""


class ArrivalOrder:
    shares_fairly = False

    def sort_key(self, request: Request) -> float:
        del request
        return 0.0

    def record_finished(self, request: Request) -> None:
        del request


class FairOrder:
    shares_fairly = True
    sort_key = ArrivalOrder.sort_key
    record_finished = ArrivalOrder.record_finished


MEMORY: Final = 16
"""Ended requests of a tenant after which an earlier one counts 1/e."""
MAX_TENANTS: Final = 10_000
PROMPT_TOKENS_A_STEP: Final = 64
"""Prompt tokens that delay others as much as one step of decoding does; prompts are computed many at a time."""


class ShortestOrder:
    """Predicts that a request is as long as those of its tenant and class were, and never longer than it may be.

    A client that names a small `max_tokens` is believed, since it is held to it.
    """

    shares_fairly = False

    def __init__(self) -> None:
        self._mean_lengths: dict[tuple[str, str], float] = {}
        """Output tokens, by class and tenant; those that were heard of last are kept."""

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


LONG_S: Final = 86_400.0
"""Seconds from its arrival to the deadline of a request without any, whose class promises nothing."""


class DeadlineOrder:
    """By the deadline a request names, else by the time to a first token that its class was promised."""

    shares_fairly = False

    def sort_key(self, request: Request) -> float:
        if request.deadline is not None:
            return request.deadline
        promised = request.request_class.ttft_slo_s
        return request.arrival_time + (LONG_S if promised is None else promised)

    def record_finished(self, request: Request) -> None:
        del request


ORDERS: Final[dict[str, Callable[[], Order]]] = {
    OrderName.FAIR: FairOrder,
    OrderName.ARRIVAL: ArrivalOrder,
    OrderName.SHORTEST: ShortestOrder,
    OrderName.DEADLINE: DeadlineOrder,
}


OUTPUT_TOKEN_WEIGHT: Final = 2
"""What a generated token counts, against one for a computed prompt token; the paper's choice."""


class TenantTokenCounters:
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
            self._evict()

    def join(self, tenant: str, least_waiting: int | None) -> None:
        """The tenant begins to wait; `least_waiting` is the least counter among those that wait already.

        Where nobody does, it starts from the counter of the last one that did.
        """
        if least_waiting is None and self._last_to_leave is not None:
            least_waiting = self.served(self._last_to_leave)
        self._floor = max(self._floor, least_waiting or 0)
        self._served[tenant] = max(self.served(tenant), self._floor)
        if len(self._served) > MAX_TENANTS:
            self._evict()

    def leave(self, tenant: str) -> None:
        """The tenant waits no longer."""
        self._last_to_leave = tenant

    def _evict(self) -> None:
        """Half of them go at once, so that it is seldom."""
        most_last = sorted(self._served, key=self._served.__getitem__)
        kept = most_last[-(MAX_TENANTS // 2) :]
        self._served = {name: self._served[name] for name in kept if self._served[name] > self._floor}
