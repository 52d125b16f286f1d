"""What the engine of a replica and those of the others tell each other between two steps."""

from __future__ import annotations

from collections.abc import Mapping

from llm_serving.core.request import Request
from llm_serving.engine.ledger import Ledger
from llm_serving.engine.weight_monitor import Lead, WeightMonitor, held_in, service_of
from llm_serving.observe.metrics import Metrics
from llm_serving.scheduler import Schedule, Scheduler


class Peers:
    """The others, as an engine sees them; belongs to the engine's thread.

    Args:
        index: Of the engine's own replica.
        scheduler: Its own.
        metrics: Of the server.
    """

    def __init__(self, index: int, scheduler: Scheduler, metrics: Metrics) -> None:
        self.ledger = Ledger()
        """Shared with the other replicas."""
        self.num_reloads = 0
        """Of the server, until there were the rules that it goes by."""
        self._index, self._scheduler, self._metrics = index, scheduler, metrics
        self._weights = WeightMonitor(scheduler)

    def listen(self) -> None:
        """Has the scheduler know what others have served, and which places of tenants are its own."""
        scheduler, ledger = self._scheduler, self.ledger
        ledger.hear(self._index)
        if scheduler.num_waiting:
            self.catch_up()
        if places := ledger.places.settle(self._index, scheduler.take_needs()):
            scheduler.deal(places)
        if (ahead := ledger.classes.take_ahead(self._index)) is not None:
            scheduler.put_ahead(ahead)

    def catch_up(self) -> None:
        """Has the scheduler know what it has heard of what others have served, before it depends on that.

        That is as long as somebody waits, and when somebody comes: nobody else goes before anybody for what tenants
        have had.
        """
        if service := self.ledger.take(self._index):
            self._scheduler.served_elsewhere(service)

    def tell(self, schedule: Schedule | None = None) -> None:
        """Has the others know what this one has served, and counts what shares and limits of all were broken.

        `schedule`: what was formed; None: nothing, or again what was formed before.
        """
        scheduler, ledger, held = self._scheduler, self.ledger, None
        ledger.served(self._index, scheduler.take_service())
        leads: Mapping[str, Lead] = {}
        if scheduler.limits.num_schedulers > 1 and (paid := scheduler.take_paid()) is not None:
            if schedule is None:
                service = {name: each.service for name, each in paid.items()}
            else:
                held = held_in(schedule, scheduler)
                service = service_of(held, scheduler)
            leads = ledger.charge(self._index, paid, service)
        if schedule is not None:
            num_beyond = ledger.limits.begun(schedule.started, scheduler.limits)
            self._metrics.shares_broken(num_beyond, self._weights.formed(schedule, leads, held))

    def reloaded(self, number: int) -> None:
        """The scheduler goes by the server's first, second, .. other rules; whoever has a place keeps it."""
        limits, places = self.ledger.limits, self.ledger.places
        self.num_reloads = number
        limits.reloaded(self._index, [*self._scheduler.not_begun_with_places(), *places.on_way()], number)

    def arrived(self, request: Request) -> None:
        """A request has come that another one has begun; it has brought its tenant's place along."""
        self.ledger.places.arrive(self._index, request.request_id)
        self._metrics.shares_broken(self.ledger.limits.arrived(request, self._scheduler.limits), 0)
