"""Who has been let in: how many wait, of which class and tenant, and how many more may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass
from llm_serving.errors import ContextLengthError, RequestError


@dataclass(slots=True)
class Tally:
    """Requests of one class at one replica, or sums of such."""

    num_waiting: int = 0
    """Let in and never scheduled yet."""
    num_waiting_tokens: int = 0
    """Of their prompts."""
    num_running: int = 0
    """Scheduled once and not ended, also while they wait after a preemption."""

    def __iadd__(self, other: Tally) -> Tally:
        self.num_waiting += other.num_waiting
        self.num_waiting_tokens += other.num_waiting_tokens
        self.num_running += other.num_running
        return self


class Excess(NamedTuple):
    """Which limit has no room, and what must leave the queue before it has."""

    limit: str
    """One of `LIMITS`."""
    message: str
    num_requests: int
    num_tokens: int


class _Limit(NamedTuple):
    name: str
    place: str
    """Key of the YAML."""
    whose: str
    """Inserted into "places ... in the queue"; empty for the whole queue."""
    num_waiting: int
    limit: int


LIMITS: Final = ("max_waiting_queue", "max_waiting_tokens", "class_max_waiting", "key_max_waiting")


class _Entry(NamedTuple):
    tally: Tally
    tenant: str
    num_tokens: int


class WaitingRoom:
    """Counts at the door, on the event loop alone, so that they are exact there.

    A request enters when it is submitted, starts when a step is formed with it for the first time, and leaves when it
    ends. Limits hold for all replicas together.
    """

    def __init__(self, config: ServingConfig) -> None:
        self._max_requests = config.scheduler.max_waiting_queue
        self._max_tokens = config.scheduler.max_waiting_tokens
        self._max_of_tenant = {key.name: key.max_waiting for key in config.api_keys if key.max_waiting is not None}
        self._classes = config.request_classes
        self._tallies: dict[tuple[int, str], Tally] = {}
        """By replica and class."""
        self._waiting: dict[str, _Entry] = {}
        self._running: dict[str, Tally] = {}
        self._waiting_of_tenant: Counter[str] = Counter()

    # --- events -----------------------------------------------------------------------------------------------------

    def enter(self, request_id: str, replica: int, request_class: RequestClass, tenant: str, num_tokens: int) -> None:
        """The request is submitted; `num_tokens` are those of its prompt."""
        tally = self._tallies.setdefault((replica, request_class.name), Tally())
        tally.num_waiting += 1
        tally.num_waiting_tokens += num_tokens
        self._waiting[request_id] = _Entry(tally, tenant, num_tokens)
        self._waiting_of_tenant[tenant] += 1

    def start(self, request_id: str) -> None:
        """The request waits no longer; one that has ended already is left alone."""
        entry = self._take(request_id)
        if entry is not None:
            entry.tally.num_running += 1
            self._running[request_id] = entry.tally

    def leave(self, request_id: str) -> None:
        """The request has ended or is given up; twice changes nothing."""
        self._take(request_id)
        tally = self._running.pop(request_id, None)
        if tally is not None:
            tally.num_running -= 1

    def _take(self, request_id: str) -> _Entry | None:
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            entry.tally.num_waiting -= 1
            entry.tally.num_waiting_tokens -= entry.num_tokens
            self._waiting_of_tenant[entry.tenant] -= 1
            if self._waiting_of_tenant[entry.tenant] == 0:
                del self._waiting_of_tenant[entry.tenant]
        return entry

    # --- questions --------------------------------------------------------------------------------------------------

    def load(self, *, replicas: Iterable[int] | None = None, max_rank: int | None = None) -> Tally:
        """What is there, of these replicas and of classes up to this rank; None: of all."""
        ranks = {each.name: each.rank for each in self._classes}
        total = Tally()
        for (replica, name), tally in self._tallies.items():
            if (replicas is None or replica in replicas) and (max_rank is None or ranks[name] <= max_rank):
                total += tally
        return total

    def class_load(self, name: str) -> Tally:
        """What is there of one class."""
        total = Tally()
        for (_, other), tally in self._tallies.items():
            if other == name:
                total += tally
        return total

    def check_group(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> None:
        """Raises RequestError for requests that, asked for together, would not fit even if nothing waited."""
        for limit in self._request_limits(request_class, tenant):
            if num_requests > limit.limit:
                rule = f"must ask for at most {limit.limit} answers at once ({limit.place})"
                raise RequestError("n", rule, num_requests)
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            rule = f"must be, once for each answer, at most {self._max_tokens} tokens"
            raise ContextLengthError("prompt", f"{rule} (scheduler_config.max_waiting_tokens)", num_tokens)

    def excess(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> Excess | None:
        """What is in the way of so many more requests with so many prompt tokens together; None: nothing."""
        total = self.load()
        mean = total.num_waiting_tokens / max(1, total.num_waiting)
        for name, place, whose, num_waiting, limit in self._request_limits(request_class, tenant):
            over = num_waiting + num_requests - limit
            if over > 0:
                taken = f"{num_waiting} of {limit} places{whose} in the queue are taken ({place})"
                return Excess(name, f"{taken}; {num_requests} needed", over, round(over * mean))
        if self._max_tokens is None:
            return None
        over = total.num_waiting_tokens + num_tokens - self._max_tokens
        if over <= 0:
            return None
        taken = f"{total.num_waiting_tokens} of {self._max_tokens} prompt tokens wait in the queue"
        message = f"{taken} (scheduler_config.max_waiting_tokens); {num_tokens} needed"
        return Excess("max_waiting_tokens", message, -(-over // max(1, round(mean))), over)

    def _request_limits(self, request_class: RequestClass, tenant: str) -> list[_Limit]:
        place = "scheduler_config.max_waiting_queue"
        limits = [_Limit("max_waiting_queue", place, "", len(self._waiting), self._max_requests)]
        if request_class.max_waiting is not None:
            name = request_class.name
            place, waiting = f"request_classes.{name}.max_waiting", self.class_load(name).num_waiting
            limits.append(_Limit("class_max_waiting", place, f" of class {name}", waiting, request_class.max_waiting))
        if tenant in self._max_of_tenant:
            place, waiting = f"api_keys.{tenant}.max_waiting", self._waiting_of_tenant[tenant]
            limits.append(_Limit("key_max_waiting", place, f" of {tenant}", waiting, self._max_of_tenant[tenant]))
        return limits
