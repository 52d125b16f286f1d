"""Usage of request classes, summed over all replicas.

`FleetClassUsage` determines which classes are deprioritized because they exceed their share. To check it,
`ClassLeadMonitor` computes the same leads from the contents of steps.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from llm_serving.scheduler.fair_sharing import ClassUsage

_NO_CLASSES: Final[frozenset[str]] = frozenset()

MAX_LEAD_QUANTA: Final = 4
"""Maximum lead (see `FleetClassUsage`) in scheduling quanta. It limits how long a class is deprioritized."""


class ClassDemand:
    """Number of replicas on which each class has unmet demand. Updated incrementally, so no step scans all replicas."""

    def __init__(self) -> None:
        self._classes: dict[int, frozenset[str]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def replicas(self) -> set[int]:
        return {*self._classes}

    @property
    def classes(self) -> Collection[str]:
        return self._counts.keys()

    def update(self, replica: int, usage: Mapping[str, ClassUsage]) -> None:
        names = frozenset([name for name, each in usage.items() if each.has_demand])
        before = self._classes.get(replica, _NO_CLASSES)
        self._classes[replica] = names
        if names != before:
            self._count(names - before, 1)
            self._count(before - names, -1)

    def leave(self, replica: int) -> None:
        self._count(self._classes.pop(replica, _NO_CLASSES), -1)

    def _count(self, names: Collection[str], change: int) -> None:
        for name in names:
            self._counts[name] += change
            if not self._counts[name]:
                del self._counts[name]


class FleetClassUsage:
    """Determines which classes exceed their share across all replicas. Thread-safe.

    The usage of a class is its service divided by its weight. Its lead is its usage minus the lowest usage of all
    classes with demand. A class is deprioritized once its lead exceeds a scheduling quantum, until it is at most half a
    quantum.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leads: Counter[str] = Counter()
        self._demand = ClassDemand()
        self._exceeding = _NO_CLASSES
        self._reported: dict[int, frozenset[str]] = {}

    @property
    def replicas(self) -> set[int]:
        return {*self._demand.replicas, *self._reported}

    def leave(self, replica: int) -> None:
        with self._lock:
            self._demand.leave(replica)
            self._reported.pop(replica, None)

    def charge(self, replica: int, usage: Mapping[str, ClassUsage]) -> None:
        with self._lock:
            self._demand.update(replica, usage)
            leads = self._leads
            for name, each in usage.items():
                leads[name] += each.service
            least = min((leads[name] for name in self._demand.classes), default=None)
            exceeding = set()
            for name, each in usage.items():
                lead = 0 if least is None else min(max(0, leads[name] - least), MAX_LEAD_QUANTA * each.quantum)
                leads[name] = lead
                if lead > each.quantum or (name in self._exceeding and 2 * lead > each.quantum):
                    exceeding.add(name)
            self._exceeding = frozenset(exceeding)

    def pop_exceeding(self, replica: int) -> frozenset[str] | None:
        """Return the classes that exceed their share. None: unchanged since the replica's last call."""
        if self._reported.get(replica, _NO_CLASSES) == self._exceeding:
            return None
        with self._lock:
            self._reported[replica] = self._exceeding
            return self._exceeding


class ClassLead(NamedTuple):
    """Lowest and highest lead of a class (see `FleetClassUsage`) between two reports of a replica."""

    lowest: float
    highest: float


class ClassLeadMonitor:
    """Computes the leads of `FleetClassUsage` from the contents of steps, to check them. Not thread-safe."""

    def __init__(self) -> None:
        self._leads: Counter[str] = Counter()
        self._demand = ClassDemand()
        self._history: defaultdict[str, ExtremesSince] = defaultdict(ExtremesSince)
        """Class -> its leads, by the number of the call of `record`."""
        self._num_records = 0
        self._last_records: dict[int, tuple[int, Collection[str]]] = {}

    @property
    def replicas(self) -> set[int]:
        return {*self._demand.replicas, *self._last_records}

    def leave(self, replica: int) -> None:
        self._demand.leave(replica)
        self._last_records.pop(replica, None)

    def record(
        self, replica: int, service: Mapping[str, int], usage: Mapping[str, ClassUsage]
    ) -> Mapping[str, ClassLead]:
        """Add a step. Return the range of each class's lead since the replica's last call.

        Args:
            service: Class -> service of the step, divided by weight.
            usage: Class -> usage that the scheduler reported.
        """
        self._demand.update(replica, usage)
        leads = self._leads
        for name, served in service.items():
            leads[name] += served
        least = min([leads[name] for name in self._demand.classes], default=None)
        self._num_records = now = self._num_records + 1
        for name, each in usage.items():
            lead = 0 if least is None else max(0, leads[name] - least)
            leads[name] = lead = min(lead, MAX_LEAD_QUANTA * each.quantum)
            self._history[name].add(now, lead)
        since, names = self._last_records.get(replica, (now, ()))
        self._last_records[replica] = now, tuple(usage)
        return {name: ClassLead(*self._history[name].since(since)) for name in names}


class ExtremesSince:
    """Minimum and maximum of a series since a given index. It stores only values below or above all later values."""

    def __init__(self) -> None:
        self._min_indices: list[int] = []
        self._minima: list[int] = []
        self._max_indices: list[int] = []
        self._maxima: list[int] = []

    def add(self, index: int, value: int) -> None:
        """Append a value. Indices must ascend."""
        minima, maxima = self._minima, self._maxima
        if minima and minima[-1] == value:  # the newest value is the last of both lists
            self._min_indices[-1] = self._max_indices[-1] = index
            return
        while minima and minima[-1] >= value:
            del self._min_indices[-1], minima[-1]
        while maxima and maxima[-1] <= value:
            del self._max_indices[-1], maxima[-1]
        self._min_indices.append(index)
        self._max_indices.append(index)
        minima.append(value)
        maxima.append(value)

    def since(self, index: int) -> tuple[int, int]:
        """Return the minimum and maximum from this index on. A value must have been added at the index."""
        least = self._minima[bisect_left(self._min_indices, index)]
        return least, self._maxima[bisect_left(self._max_indices, index)]
