"""What replicas tell each other of those they serve: so shares and limits are those of the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from llm_serving.engine.class_account import ClassAccount
from llm_serving.engine.limit_monitor import LimitMonitor
from llm_serving.engine.served import Served, Service
from llm_serving.engine.tenant_places import TenantPlaces
from llm_serving.engine.weight_monitor import Lead, Standing
from llm_serving.scheduler.turns import Paid


class Ledger:
    """One for all replicas of a master; each engine's thread tells and takes once a step.

    A scheduler is told between two steps and records it, so its decisions follow from what it was told as before. What
    others do during a step it learns for the next one: tenants that wait somewhere all the time differ by no more than
    each replica alone allows, and what the others compute in two steps.
    """

    def __init__(self) -> None:
        self.places = TenantPlaces()
        """That tenants with a limit may take."""
        self.classes = ClassAccount()
        self.limits = LimitMonitor()
        """Watches what `places` sees to."""
        self._standing = Standing()
        """The same of `classes`."""
        self._charging = threading.Lock()
        self._lock = threading.Lock()
        self._served = Served()

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

    def charge(self, replica: int, paid: Mapping[str, Paid], service: Mapping[str, int]) -> Mapping[str, Lead]:
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
