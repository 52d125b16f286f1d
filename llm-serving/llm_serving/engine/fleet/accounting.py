"""Accounting across replicas: limits of tenants and weights of classes hold for all replicas together.

`FleetAccounting` is shared by all engines; `ServedTokens` sums what each tenant was served. Each engine reports and
reads between two steps, through its `ReplicaSync`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from llm_serving.core.request import Request
from llm_serving.engine.fleet.class_shares import FleetClassUsage
from llm_serving.engine.fleet.monitors import ClassLead, ClassStanding, LimitMonitor, WeightMonitor, held_in, service_of
from llm_serving.engine.fleet.tenant_slots import TenantSlots
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.fair_sharing import ClassUsage
from llm_serving.scheduler.orders import MAX_TENANTS

Service = Mapping[tuple[str, str], int]
"""(class, tenant) -> tokens, as virtual token counters count them."""


class ServedTokens:
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


class FleetAccounting:
    """One for all replicas of a master; each engine's thread tells and takes once a step.

    A scheduler is told between two steps and records it, so its decisions follow from what it was told as before. What
    others do during a step it learns for the next one: tenants that wait somewhere all the time differ by no more than
    each replica alone allows, and what the others compute in two steps.
    """

    def __init__(self) -> None:
        self.places = TenantSlots()
        """That tenants with a limit may take."""
        self.classes = FleetClassUsage()
        self.limits = LimitMonitor()
        """Watches what `places` sees to."""
        self._standing = ClassStanding()
        """The same of `classes`."""
        self._charging = threading.Lock()
        self._lock = threading.Lock()
        self._served = ServedTokens()

    @property
    def replicas(self) -> set[int]:
        """That count in any part of it; to be asked while none of them tells it anything."""
        parts = self.places.replicas, self.limits.replicas, self.classes.replicas, self._standing.replicas
        return self._served.replicas.union(*parts)

    def join(self, replica: int, nudge: Callable[[], None] = lambda: None, num_reloads: int = 0) -> None:
        """A replica begins to serve; what was before it is not told.

        Args:
            replica: Its index.
            nudge: Has its thread look again at what is shared; may be called from any thread.
            num_reloads: Of the server, until there were the rules that the replica goes by.
        """
        self.places.join(replica, nudge)
        self.limits.join(replica, num_reloads)
        self._leave_classes(replica)
        with self._lock:
            self._served.join(replica)

    def leave(self, replica: int) -> None:
        """A replica serves no longer."""
        self.places.leave(replica)
        self.limits.leave(replica)
        self._leave_classes(replica)
        with self._lock:
            self._served.leave(replica)

    def served(self, replica: int, service: Service) -> None:
        """A replica has formed a step."""
        if service:
            with self._lock:
                self._served.add(replica, service)

    def charge(
        self, replica: int, paid: Mapping[str, ClassUsage], service: Mapping[str, int]
    ) -> Mapping[str, ClassLead]:
        """A replica has formed a step, or has nothing to form one of.

        Args:
            replica: Its index.
            paid: What its scheduler says that classes have paid.
            service: The same as a look at the step tells.

        Returns:
            By how much each class was ahead since the call before.
        """
        with self._charging:  # both in one order
            self.classes.charge(replica, paid)
            return self._standing.tell(replica, service, paid)

    def _leave_classes(self, replica: int) -> None:
        with self._charging:
            self.classes.leave(replica)
            self._standing.leave(replica)

    def hear(self, replica: int) -> None:
        """From now on `take` tells what the others have served until here."""
        if self._served.has_news(replica):
            with self._lock:
                self._served.hear(replica)

    def take(self, replica: int) -> Service:
        """What the others had served at the last `hear`, since the call before."""
        with self._lock:
            return self._served.take(replica)


class ReplicaSync:
    """The others, as an engine sees them; belongs to the engine's thread.

    Args:
        index: Of the engine's own replica.
        scheduler: Its own.
        metrics: Of the server.
    """

    def __init__(self, index: int, scheduler: Scheduler, metrics: Metrics) -> None:
        self.ledger = FleetAccounting()
        """Shared with the other replicas."""
        self.num_reloads = 0
        """Number of the reload that gave the scheduler its rules; 0: the configuration of the start."""
        self._index, self._scheduler, self._metrics = index, scheduler, metrics
        self._weights = WeightMonitor(scheduler)

    def listen(self) -> None:
        """Has the scheduler know what others have served, and which places of tenants are its own."""
        scheduler, ledger = self._scheduler, self.ledger
        ledger.hear(self._index)
        if scheduler.num_waiting:
            self.catch_up()
        if places := ledger.places.settle(self._index, scheduler.pop_tenant_demand()):
            scheduler.adjust_tenant_leases(places)
        if (ahead := ledger.classes.take_ahead(self._index)) is not None:
            scheduler.deprioritize(ahead)

    def catch_up(self) -> None:
        """Has the scheduler know what it has heard of what others have served, before it depends on that.

        That is as long as somebody waits, and when somebody comes: nobody else goes before anybody for what tenants
        have had.
        """
        if service := self.ledger.take(self._index):
            self._scheduler.charge_remote_service(service)

    def tell(self, schedule: Schedule | None = None) -> None:
        """Has the others know what this one has served, and counts what shares and limits of all were broken.

        `schedule`: what was formed; None: nothing, or again what was formed before.
        """
        scheduler, ledger, held = self._scheduler, self.ledger, None
        ledger.served(self._index, scheduler.pop_service())
        leads: Mapping[str, ClassLead] = {}
        if scheduler.limits.num_schedulers > 1 and (paid := scheduler.pop_class_usage()) is not None:
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
        limits.reloaded(self._index, [*self._scheduler.unstarted_slot_holders(), *places.on_way()], number)

    def arrived(self, request: Request) -> None:
        """A request has come that another one has begun; it has brought its tenant's place along."""
        self.ledger.places.arrive(self._index, request.request_id)
        self._metrics.shares_broken(self.ledger.limits.arrived(request, self._scheduler.limits), 0)
