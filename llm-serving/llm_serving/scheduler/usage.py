"""Service accounting: what classes and tenants received, here and from other replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from llm_serving.scheduler.orders import Order
from llm_serving.scheduler.queues import WaitingQueue
from llm_serving.scheduler.running import RunningSlots


class ServiceAccounting:
    """Charges the virtual token counters of tenants and the weighted fair sharing of classes."""

    def __init__(self, waiting: WaitingQueue, slots: RunningSlots, order: Order) -> None:
        self._waiting = waiting
        self._slots = slots
        self._order = order
        self._service: dict[tuple[str, str], int] = {}
        """By class and tenant: service since the last `pop_service`, if other schedulers need it."""

    def adopt(self, before: ServiceAccounting) -> None:
        """Continue with the service that was not popped before a reload."""
        self._service = before._service

    def charge(self, name: str, tenant: str, num_tokens: int) -> None:
        """Charge a tenant of a class for tokens, generated ones weighted by `OUTPUT_TOKEN_WEIGHT`."""
        self._waiting.queues[name].charge(tenant, num_tokens)
        if self._order.shares_fairly and self._waiting.sharing.is_shared:
            self._service[name, tenant] = self._service.get((name, tenant), 0) + num_tokens

    def charge_step(
        self,
        charges: Mapping[tuple[str, str], int],
        tokens: Mapping[str, int],
        backlogged: Collection[str],
        unserved: Collection[str],
    ) -> None:
        """Charge a step.

        Args:
            charges: Tokens by class and tenant.
            tokens: Tokens by class.
            backlogged: Classes with a waiting request or a prompt to compute.
            unserved: Classes with a prompt for which the step had too few tokens.
        """
        for (name, tenant), num_tokens in charges.items():
            self.charge(name, tenant, num_tokens)
        slots = self._slots
        self._waiting.sharing.charge(slots.slots_by_class, tokens, slots.blocks_by_class, backlogged, unserved)

    def charge_remote(self, service: Mapping[tuple[str, str], int]) -> None:
        """Charge service that other replicas delivered."""
        if not self._order.shares_fairly:
            return
        queues = self._waiting.queues
        for (name, tenant), num_tokens in service.items():
            if (queue := queues.get(name)) is not None:  # another replica may have reloaded other classes already
                queue.token_counters.charge(tenant, num_tokens)

    def pop_service(self) -> dict[tuple[str, str], int]:
        """Return the service since the last call, by class and tenant."""
        service, self._service = self._service, {}
        return service
