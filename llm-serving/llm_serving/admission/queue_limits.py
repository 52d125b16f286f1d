"""Requests that wait and run, as the event loop counts them, and the limits on what may wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import ContextLengthError, RequestError

LIMITS: Final = ("max_waiting_queue", "max_waiting_tokens", "class_max_waiting", "key_max_waiting")
DRAIN_MEMORY: Final = 128
"""Finished requests after which one counts 1/e in a drain rate."""
MIN_FINISHED: Final = 16
"""Finished requests that a drain rate needs."""
QUEUE_KEY: Final = "scheduler_config.max_waiting_queue"


@dataclass(slots=True)
class QueueLoad:
    """Numbers of requests and tokens, of one class at one replica or summed up."""

    num_waiting: int = 0
    """Admitted requests that were never scheduled."""
    num_waiting_tokens: int = 0
    """Prompt tokens of the waiting requests."""
    num_uncached_tokens: int = 0
    """Those of them that no prefix cache holds."""
    num_running: int = 0
    """Requests that were scheduled and have not finished, also while they are preempted."""

    def __iadd__(self, other: QueueLoad) -> QueueLoad:
        self.num_waiting += other.num_waiting
        self.num_waiting_tokens += other.num_waiting_tokens
        self.num_uncached_tokens += other.num_uncached_tokens
        self.num_running += other.num_running
        return self


class QueueLimit(NamedTuple):
    """One limit as it applies to a group of requests that ask for admission."""

    name: str
    """One of `LIMITS`, the reason in the metric of refusals."""
    key: str
    """The YAML key, which also names the limit."""
    used: int
    limit: int
    amount: int
    """What the group needs of it."""
    rate: float | None
    """What becomes free in a second while requests wait; None: not measured yet."""
    message: str

    @property
    def is_exceeded(self) -> bool:
        return self.used + self.amount > self.limit

    @property
    def refusal(self) -> str:
        return f"{self.message} ({self.key}); {self.amount} needed"


class DrainRate:
    """Requests that finish in a second while other requests wait; time without waiting requests is not counted."""

    def __init__(self) -> None:
        self._finished = 0.0
        self._seconds = 0.0
        self._num_finished = 0
        self._since: float | None = None
        """End of the time counted so far, while requests wait."""

    def update(self, now: float, has_waiting: bool) -> None:
        """Record whether requests wait from now on."""
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
        """Return the rate, or None before `MIN_FINISHED` requests have finished."""
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        return None if self._num_finished < MIN_FINISHED or seconds <= 0 else self._finished / seconds


class _Entry(NamedTuple):
    replica: int
    class_name: str
    tenant: str
    num_tokens: int
    num_uncached: int


class AdmissionQueue:
    """Counts admitted requests on the event loop, so that the counts are exact there.

    `add` counts a submitted request, `start` its first step, `remove` its end. All limits hold for the sum of all
    replicas.
    """

    def __init__(self, config: ServingConfig, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, _Entry] = {}
        self._loads: dict[tuple[int | None, str], QueueLoad] = {}
        """By replica and class; None: all replicas."""
        self._waiting_of_tenant: Counter[str] = Counter()
        self._running_of_tenant: Counter[str] = Counter()
        self._rates: dict[str, DrainRate] = {QUEUE_KEY: DrainRate()}
        """By YAML key: of the whole queue, and of each class and API key that has a limit of its own."""
        self.reload(config)

    def reload(self, config: ServingConfig) -> None:
        """Apply the limits of another configuration to requests that arrive from now on."""
        self._max_requests = config.scheduler.max_waiting_queue
        self._max_tokens = config.scheduler.max_waiting_tokens
        self._max_waiting_of = {key.name: key.max_waiting for key in config.api_keys if key.max_waiting is not None}
        self._classes = config.request_classes
        self._max_running = config.scheduler.max_running_per_tenant
        self._max_running_of = {key.name: key.max_running for key in config.api_keys if key.max_running is not None}
        classes = [_class_key(each.name) for each in config.request_classes if each.max_waiting is not None]
        for key in (*classes, *map(_tenant_key, self._max_waiting_of)):
            self._rates.setdefault(key, DrainRate())

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
        """Count a request that was submitted to a replica, with so many prompt tokens, of which some are cached."""
        entry = _Entry(replica, request_class.name, tenant, num_tokens, num_tokens - num_cached_tokens)
        self._waiting[request_id] = entry
        self._count_waiting(entry, 1)

    def start(self, request_id: str) -> None:
        """Count a waiting request as running; do nothing if it has finished."""
        if (entry := self._waiting.pop(request_id, None)) is not None:
            self._count_waiting(entry, -1)
            self._running[request_id] = entry
            self._count_running(entry, 1)

    def remove(self, request_id: str) -> None:
        """Stop counting a request that finished or was aborted; do nothing the second time."""
        if (entry := self._waiting.pop(request_id, None)) is not None:
            self._count_waiting(entry, -1)
        if (entry := self._running.pop(request_id, None)) is not None:
            self._count_running(entry, -1)
            now = self._clock()
            for key in (QUEUE_KEY, _class_key(entry.class_name), _tenant_key(entry.tenant)):
                if (rate := self._rates.get(key)) is not None:
                    rate.record_finished(now)

    def change_replica(self, request_id: str, replica: int) -> None:
        """Count a running request at the replica it migrated to; do nothing if it has finished."""
        if (before := self._running.get(request_id)) is not None:
            after = self._running[request_id] = before._replace(replica=replica)
            self._count_running(before, -1)
            self._count_running(after, 1)

    def change_class(self, request_id: str, request_class: RequestClass) -> None:
        """Count a request in another class; do nothing if it has finished."""
        for entries, count in ((self._waiting, self._count_waiting), (self._running, self._count_running)):
            if (before := entries.get(request_id)) is not None:
                after = entries[request_id] = before._replace(class_name=request_class.name)
                count(before, -1)
                count(after, 1)

    def _count_waiting(self, entry: _Entry, change: int) -> None:
        for load in self._loads_of(entry):
            load.num_waiting += change
            load.num_waiting_tokens += change * entry.num_tokens
            load.num_uncached_tokens += change * entry.num_uncached
        _add(self._waiting_of_tenant, entry.tenant, change)
        now = self._clock()
        self._rates[QUEUE_KEY].update(now, bool(self._waiting))
        if (rate := self._rates.get(_class_key(entry.class_name))) is not None:
            rate.update(now, self._loads[None, entry.class_name].num_waiting > 0)
        if (rate := self._rates.get(_tenant_key(entry.tenant))) is not None:
            rate.update(now, self._waiting_of_tenant[entry.tenant] > 0)

    def _count_running(self, entry: _Entry, change: int) -> None:
        for load in self._loads_of(entry):
            load.num_running += change
        _add(self._running_of_tenant, entry.tenant, change)

    def _loads_of(self, entry: _Entry) -> list[QueueLoad]:
        return [self._loads.setdefault((each, entry.class_name), QueueLoad()) for each in (entry.replica, None)]

    # --- queries ----------------------------------------------------------------------------------------------------

    def load(self, replica: int | None = None, max_rank: int | None = None) -> QueueLoad:
        """Return the load of one replica (None: of all) in the classes up to a rank (None: in all)."""
        total = QueueLoad()
        for each in self._classes:
            if max_rank is None or each.rank <= max_rank:
                total += self._loads.get((replica, each.name), _NO_LOAD)
        return total

    def class_load(self, name: str) -> QueueLoad:
        return replace(self._loads.get((None, name), _NO_LOAD))

    def waiting_ahead(self, replica: int, max_rank: int | None) -> tuple[int, int]:
        """Return how many waiting requests of a replica are ahead of a new one, and their uncached prompt tokens.

        Requests beyond the concurrency limit of their tenant are not ahead of requests of other tenants.
        """
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
        """Return how many requests of the tenant may run at once; None: there is no such limit."""
        return self._max_running_of.get(tenant, self._max_running)

    def num_unfinished_of(self, tenant: str) -> int:
        """Return how many requests of the tenant wait or run."""
        return self._waiting_of_tenant[tenant] + self._running_of_tenant[tenant]

    # --- limits -----------------------------------------------------------------------------------------------------

    def check_group(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> None:
        """Raise RequestError if a group of requests exceeds a limit even when no other request waits."""
        for limit in self._request_limits(num_requests, request_class, tenant):
            if num_requests > limit.limit:
                rule = f"must ask for at most {limit.limit} answers at once ({limit.key})"
                raise RequestError("n", rule, num_requests)
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            rule = f"must be, once for each answer, at most {self._max_tokens} tokens"
            raise ContextLengthError("prompt", f"{rule} (scheduler_config.max_waiting_tokens)", num_tokens)

    def limits(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> list[QueueLimit]:
        """Return all limits that a group of requests with so many prompt tokens must keep."""
        limits = self._request_limits(num_requests, request_class, tenant)
        if (limit := self._max_tokens) is not None:
            total, rate = self.load(), limits[0].rate
            used = total.num_waiting_tokens
            rate = None if rate is None or not used else rate * used / total.num_waiting
            message = f"{used} of {limit} prompt tokens wait in the queue"
            key = "scheduler_config.max_waiting_tokens"
            limits.append(QueueLimit("max_waiting_tokens", key, used, limit, num_tokens, rate, message))
        return limits

    def _request_limits(self, num_requests: int, request_class: RequestClass, tenant: str) -> list[QueueLimit]:
        name = request_class.name
        rows = [
            ("max_waiting_queue", QUEUE_KEY, len(self._waiting), self._max_requests, ""),
            (
                "class_max_waiting",
                _class_key(name),
                self._loads.get((None, name), _NO_LOAD).num_waiting,
                request_class.max_waiting,
                f" of class {name}",
            ),
            (
                "key_max_waiting",
                _tenant_key(tenant),
                self._waiting_of_tenant[tenant],
                self._max_waiting_of.get(tenant),
                f" of {tenant}",
            ),
        ]
        now = self._clock()
        return [
            QueueLimit(
                reason,
                key,
                used,
                limit,
                num_requests,
                self._rates[key].per_second(now),
                f"{used} of {limit} places{scope} in the queue are taken",
            )
            for reason, key, used, limit, scope in rows
            if limit is not None
        ]


_NO_LOAD: Final = QueueLoad()


def _class_key(name: str) -> str:
    return f"request_classes.{name}.max_waiting"


def _tenant_key(name: str) -> str:
    return f"api_keys.{name}.max_waiting"


def _add(counts: Counter[str], name: str, change: int) -> None:
    """Change a count, and drop it when it is 0."""
    counts[name] += change
    if not counts[name]:
        del counts[name]
