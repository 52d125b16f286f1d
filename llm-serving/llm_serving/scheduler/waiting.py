"""Everybody without a place: who queues for one, who may not yet, and how long each was promised to wait at most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from llm_serving.core.request import Request, RequestStatus
from llm_serving.scheduler.bounds import WaitMonitor
from llm_serving.scheduler.queues import WaitingQueue
from llm_serving.scheduler.running import RunningSlots
from llm_serving.scheduler.tenant_limits import LimiterChanges, TenantLimiter


class WaitingRequests:
    """A request without a place is in one of four: the queue, the gate of its tenant, behind its parent, or laid aside.

    Whoever comes into the queue is promised on that moment how many steps it waits at most; the monitor watches it.
    """

    def __init__(self, queue: WaitingQueue, gate: TenantLimiter, monitor: WaitMonitor, places: RunningSlots) -> None:
        self.queue = queue
        self.tenant_limiter = gate
        self.monitor = monitor
        self.forks: dict[str, list[Request]] = {}
        """Requests that wait until the one they were forked from has computed its prompt, by the id of that."""
        self.paused: list[Request] = []
        """Requests that gave way while they were paused: they do not wait for a place before they go on."""
        self.num_arrivals = 0
        """Requests that have come so far."""
        self.num_admitted = 0
        """Places that have been given so far."""
        self._slots = places

    def __iter__(self) -> Iterator[Request]:
        """All of them, in no particular order."""
        return chain(self.queue, *self.forks.values(), self.tenant_limiter.held_requests(), self.paused)

    def add_fork(self, request: Request, parent: Request) -> None:
        """The request waits for the prompt of its parent."""
        self.forks.setdefault(parent.request_id, []).append(request)

    def release_forks(self, parent: Request) -> None:
        for fork in self.forks.pop(parent.request_id, []):
            self.enqueue(fork)

    def num_steps_waited(self) -> dict[int, int]:
        """`Request.sequence` -> steps that have been counted since it began to wait, of those that queue."""
        return {request.sequence: self.monitor.num_steps_waited(request) for request in self.queue}

    def adopt(self, before: WaitingRequests, num_waited: Mapping[int, int], everybody: Iterable[Request]) -> None:
        """All that wait elsewhere wait here, as had they come in this moment, in the order in which they came.

        What was promised elsewhere is promised anew, and what they have waited is not forgotten.

        Args:
            before: Where they wait; they may be of other classes now.
            num_waited: As it told.
            everybody: All requests, those that run included.
        """
        self.forks, self.paused = before.forks, before.paused
        self.num_arrivals, self.num_admitted = before.num_arrivals, before.num_admitted
        self.tenant_limiter.adopt(before.tenant_limiter)
        for request in everybody:
            if request.has_run or request.transfer is not None:
                self.tenant_limiter.record_admission(request)
        waiting = [*before.queue, *before.tenant_limiter.held_requests()]
        for request in sorted(waiting, key=lambda each: (not each.has_run, each.class_sequence)):
            self.enqueue(request, num_waited.get(request.sequence, 0))

    def pause(self, request: Request) -> None:
        """A request that queues is paused: it waits for what is to follow, not for a place."""
        self.queue.discard(request)
        self.paused.append(request)

    def resume(self, request: Request) -> None:
        """What follows is decided; it waits for a place if it was laid aside."""
        if request in self.paused:
            self.paused.remove(request)
            self.enqueue(request)

    def enqueue(self, request: Request, num_waited: int = 0) -> None:
        """It waits from now on, and has waited so many steps already; or is kept apart, where nothing is promised."""
        changes = None if request.has_run else self.tenant_limiter.add(request)
        if changes is None or request in changes.released:
            self.set_wait_bound(request, num_waited)
            self.queue.push(request)
        else:
            self.monitor.forget(request)
        if changes is not None:
            self.apply_limiter_changes(changes, request)

    def enqueue_migrated(self, request: Request, num_waited: int) -> None:
        """A request that another scheduler has begun waits for a place; that of its tenant it has taken along."""
        self.apply_limiter_changes(self.tenant_limiter.add_migrated(request))
        self.enqueue(request, num_waited)

    def requeue(self, request: Request) -> None:
        """A request that ran waits for a place; a paused one first for what is to follow."""
        request.status = RequestStatus.WAITING
        if request.paused:
            self.paused.append(request)
        else:
            self.enqueue(request)

    def record_admission(self, request: Request) -> None:
        """One that queued gets a place now."""
        request.admission_number = self.num_admitted
        self.num_admitted += 1
        self.queue.pop(request)
        self.monitor.record_admission(request)
        self.apply_limiter_changes(self.tenant_limiter.record_admission(request))

    def remove(self, request: Request) -> None:
        """It ends, wherever it waits."""
        if request in self.paused:
            self.paused.remove(request)
            return
        self.queue.discard(request)
        siblings = self.forks.get(request.fork_of or "", [])
        if request in siblings:
            siblings.remove(request)

    def forget(self, request: Request) -> None:
        """Nothing is promised to it any more, and its tenant may run another in its stead."""
        self.monitor.forget(request)
        self.apply_limiter_changes(self.tenant_limiter.remove(request))

    def apply_limiter_changes(self, changes: LimiterChanges, but: Request | None = None) -> None:
        """What the limits of tenants decided; those let in wait from now on, behind those who wait already."""
        for request in changes.held:
            self.queue.discard(request)
            self.monitor.forget(request)
        for request in changes.released:
            if request is but:
                continue
            request.class_sequence = self.num_arrivals
            self.set_wait_bound(request)
            self.queue.push(request)

    def set_wait_bound(self, request: Request, num_waited: int = 0) -> None:
        """Whoever waits or runs in its class now, or is held back there, may be admitted before it."""
        name = request.request_class.name
        queue = self.queue.queues[name]
        held_back = sum([each.request_class.name == name for each in chain(*self.forks.values())])
        returning = sum([each.request_class.name == name for each in self.paused])
        returning += queue.num_returning + self._slots.slots_by_class[name]
        self.monitor.start_wait(request, len(queue) - queue.num_returning + held_back, returning, num_waited)

    def check_integrity(self) -> None:
        """Raises AssertionError when somebody waits where it cannot."""
        assert all(request.paused for request in self.paused)
        assert not any(request.paused for request in chain(self.queue, *self.forks.values()))
        assert not any(request.has_run for request in self.tenant_limiter.held_requests())

    def tick(self, closed: Collection[str], uncounted: Collection[str]) -> int:
        """A step has been formed without the classes in `closed`; returns how many promises are broken by it.

        Steps of classes in `uncounted` are none for what was promised.
        """
        self.queue.tick(closed)
        return self.monitor.tick(uncounted)
