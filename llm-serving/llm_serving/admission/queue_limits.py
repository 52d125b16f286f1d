"""Counts of waiting and running requests, for the event loop, and the limits on waiting requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import ContextLengthError, RequestError

LIMITS: Final = ("max_waiting_queue", "max_waiting_tokens", "class_max_waiting", "key_max_waiting")
DRAIN_MEMORY: Final = 128
"""Time constant of a drain rate, in finished requests."""
MIN_FINISHED: Final = 16
QUEUE_KEY: Final = "scheduler_config.max_waiting_queue"
TOKENS_KEY: Final = "scheduler_config.max_waiting_tokens"


@dataclass(slots=True)
class QueueLoad:
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_uncached_tokens: int = 0
    """Number of prompt tokens of waiting requests that are not in the prefix cache."""
    num_running: int = 0
    """Number of unfinished requests that were scheduled at least once."""


class DrainRate:
    """Number of requests that finish per second, measured only while other requests wait."""

    def __init__(self) -> None:
        self._finished = 0.0
        self._seconds = 0.0
        self._num_finished = 0
        self._since: float | None = None
        """Time up to which `_seconds` includes the time with waiting requests. It is None while no request waits."""

    def update(self, now: float, has_waiting: bool) -> None:
        if has_waiting and self._since is None:
            self._since = now
        elif not has_waiting and self._since is not None:
            self._seconds += now - self._since
            self._since = None

    def record_finished(self, now: float) -> None:
        if self._since is None:
            return
        keep = 1 - 1 / DRAIN_MEMORY
        self._seconds = self._seconds * keep + now - self._since
        self._finished = self._finished * keep + 1
        self._since = now
        self._num_finished += 1

    def per_second(self, now: float) -> float | None:
        """Return the number of requests that finish per second, or None until `MIN_FINISHED` requests have finished."""
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        return None if self._num_finished < MIN_FINISHED or seconds <= 0 else self._finished / seconds


class QueueLimit(NamedTuple):
    """A limit of the waiting queue, its use, and what new requests add. `unit`: what it counts, such as "requests"."""

    name: str
    """One of `LIMITS`, which is also the reason in the metric of refusals."""
    key: str
    unit: str
    used: int
    limit: int
    amount: int
    """How much, in `unit`, the new requests add."""
    drain_rate: DrainRate
    amount_per_request: float = 1.0
    """How much, in `unit`, a finished request frees."""

    @property
    def is_exceeded(self) -> bool:
        return self.used + self.amount > self.limit

    @property
    def refusal(self) -> str:
        return f"{self.used} of {self.limit} {self.unit} wait in the queue ({self.key}); {self.amount} needed"

    @property
    def never_fits(self) -> RequestError:
        if self.name == "max_waiting_tokens":
            rule = f"must have at most {self.limit} tokens, counted once for each requested answer ({self.key})"
            return ContextLengthError("prompt", rule, self.amount)
        rule = f"must ask for at most {self.limit} answers or texts at once, as many as the queue holds ({self.key})"
        return RequestError("n", rule, self.amount)

    def freed_per_second(self, now: float) -> float | None:
        """Return how much, in `unit`, becomes free per second while requests wait, or None if that is unmeasured."""
        rate = self.drain_rate.per_second(now)
        return None if rate is None else rate * self.amount_per_request


class _Entry(NamedTuple):
    replica: int
    class_name: str
    tenant: str
    num_tokens: int
    num_uncached: int


class AdmissionQueue:
    """Counts admitted requests, for limits that apply to all replicas together. Only the event loop may call it."""

    def __init__(self, config: ServingConfig, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, _Entry] = {}
        self._loads: dict[tuple[int | None, str], QueueLoad] = {}
        self._waiting_of_tenant: Counter[str] = Counter()
        self._running_of_tenant: Counter[str] = Counter()
        self._drain_rate = DrainRate()
        self._drain_rate_of_class: dict[str, DrainRate] = {}
        self._drain_rate_of_tenant: dict[str, DrainRate] = {}
        self.reload(config)

    def reload(self, config: ServingConfig) -> None:
        self._max_requests = config.scheduler.max_waiting_queue
        self._max_tokens = config.scheduler.max_waiting_tokens
        self._max_waiting_of = {key.name: key.max_waiting for key in config.api_keys if key.max_waiting is not None}
        self._classes = config.request_classes
        self._max_running = config.scheduler.max_running_per_tenant
        self._max_running_of = {key.name: key.max_running for key in config.api_keys if key.max_running is not None}
        for name in [each.name for each in config.request_classes if each.max_waiting is not None]:
            self._drain_rate_of_class.setdefault(name, DrainRate())
        for name in self._max_waiting_of:
            self._drain_rate_of_tenant.setdefault(name, DrainRate())

    def share_tenants(self, other: AdmissionQueue) -> None:
        """Limit the sum of a tenant's waiting requests here and in `other`, the queue of a second model."""
        self._waiting_of_tenant = other._waiting_of_tenant

    # --- events -----------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        replica: int,
        request_class: RequestClass,
        tenant: str,
        num_tokens: int,
        num_cached_tokens: int = 0,
    ) -> None:
        """Count a request with `num_tokens` prompt tokens, of which its replica has `num_cached_tokens` cached."""
        entry = _Entry(replica, request_class.name, tenant, num_tokens, num_tokens - num_cached_tokens)
        self._waiting[request_id] = entry
        self._count(entry, waiting=1)

    def start(self, request_ids: Iterable[str]) -> None:
        """Count waiting requests as running, except those that have finished."""
        for request_id in request_ids:
            if (entry := self._waiting.pop(request_id, None)) is not None:
                self._running[request_id] = entry
                self._count(entry, waiting=-1, running=1)

    def remove(self, request_id: str) -> None:
        """Stop counting a request that finished or was aborted. A second call has no effect."""
        if (entry := self._waiting.pop(request_id, None)) is not None:
            self._count(entry, waiting=-1)
        if (entry := self._running.pop(request_id, None)) is not None:
            self._count(entry, running=-1)
            now = self._clock()
            self._drain_rate.record_finished(now)
            if (rate := self._drain_rate_of_class.get(entry.class_name)) is not None:
                rate.record_finished(now)
            if (rate := self._drain_rate_of_tenant.get(entry.tenant)) is not None:
                rate.record_finished(now)

    def change_replica(self, request_id: str, replica: int) -> None:
        if (before := self._running.get(request_id)) is not None:
            after = self._running[request_id] = before._replace(replica=replica)
            self._count(before, running=-1)
            self._count(after, running=1)

    def change_class(self, request_id: str, request_class: RequestClass) -> None:
        for entries, waiting, running in ((self._waiting, 1, 0), (self._running, 0, 1)):
            if (before := entries.get(request_id)) is not None:
                after = entries[request_id] = before._replace(class_name=request_class.name)
                self._count(before, waiting=-waiting, running=-running)
                self._count(after, waiting=waiting, running=running)

    def _count(self, entry: _Entry, *, waiting: int = 0, running: int = 0) -> None:
        name, tenant = entry.class_name, entry.tenant
        for replica in (entry.replica, None):
            if (load := self._loads.get((replica, name))) is None:
                load = self._loads[replica, name] = QueueLoad()
            load.num_waiting += waiting
            load.num_waiting_tokens += waiting * entry.num_tokens
            load.num_uncached_tokens += waiting * entry.num_uncached
            load.num_running += running
        for counts, change in ((self._waiting_of_tenant, waiting), (self._running_of_tenant, running)):
            counts[tenant] += change
            if not counts[tenant]:
                del counts[tenant]
        if waiting:
            now = self._clock()
            self._drain_rate.update(now, bool(self._waiting))
            if (rate := self._drain_rate_of_class.get(name)) is not None:
                rate.update(now, self._loads[None, name].num_waiting > 0)
            if (rate := self._drain_rate_of_tenant.get(tenant)) is not None:
                rate.update(now, self._waiting_of_tenant[tenant] > 0)

    # --- queries ----------------------------------------------------------------------------------------------------

    def load(self, replica: int | None = None, max_rank: int | None = None) -> QueueLoad:
        """Count waiting and running requests of a replica (None: all) in classes up to rank `max_rank` (None: all)."""
        total = QueueLoad()
        for request_class in self._classes:
            each = self._loads.get((replica, request_class.name))
            if each is not None and (max_rank is None or request_class.rank <= max_rank):
                total.num_waiting += each.num_waiting
                total.num_waiting_tokens += each.num_waiting_tokens
                total.num_uncached_tokens += each.num_uncached_tokens
                total.num_running += each.num_running
        return total

    def class_load(self, name: str) -> QueueLoad:
        return replace(self._loads.get((None, name), _NO_LOAD))

    def waiting_ahead(self, replica: int, max_rank: int | None) -> tuple[int, int]:
        """Return (number, uncached tokens) of waiting requests in classes up to rank `max_rank`, or in all if None."""
        if self._max_running is None and not self._max_running_of:
            load = self.load(replica, max_rank)
            return load.num_waiting, load.num_uncached_tokens
        names = {each.name for each in self._classes if max_rank is None or each.rank <= max_rank}
        num_requests = num_tokens = 0
        running = self._running_of_tenant.copy()
        for entry in self._waiting.values():
            limit = self.max_running(entry.tenant)
            is_ahead = entry.replica == replica and entry.class_name in names
            if is_ahead and (limit is None or running[entry.tenant] < limit):
                running[entry.tenant] += 1
                num_requests += 1
                num_tokens += entry.num_uncached
        return num_requests, num_tokens

    def max_running(self, tenant: str) -> int | None:
        return self._max_running_of.get(tenant, self._max_running)

    def num_unfinished_of(self, tenant: str) -> int:
        return self._waiting_of_tenant[tenant] + self._running_of_tenant[tenant]

    def limits(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> list[QueueLimit]:
        """Return all limits that apply to a group of new requests. The limit of the whole queue comes first."""
        num_waiting = len(self._waiting)
        limits = [
            QueueLimit(
                LIMITS[0], QUEUE_KEY, "requests", num_waiting, self._max_requests, num_requests, self._drain_rate
            )
        ]
        if (limit := request_class.max_waiting) is not None:
            name = request_class.name
            key, unit = f"request_classes.{name}.max_waiting", f"requests of class {name}"
            used = self._loads.get((None, name), _NO_LOAD).num_waiting
            rate = self._drain_rate_of_class[name]
            limits.append(QueueLimit("class_max_waiting", key, unit, used, limit, num_requests, rate))
        if (limit := self._max_waiting_of.get(tenant)) is not None:
            key, unit = f"api_keys.{tenant}.max_waiting", f"requests of {tenant}"
            used, rate = self._waiting_of_tenant[tenant], self._drain_rate_of_tenant[tenant]
            limits.append(QueueLimit("key_max_waiting", key, unit, used, limit, num_requests, rate))
        if (limit := self._max_tokens) is not None:
            total, unit = self.load(), "prompt tokens"
            used, mean = total.num_waiting_tokens, total.num_waiting_tokens / max(1, total.num_waiting)
            limits.append(
                QueueLimit("max_waiting_tokens", TOKENS_KEY, unit, used, limit, num_tokens, self._drain_rate, mean)
            )
        return limits


_NO_LOAD: Final = QueueLoad()
