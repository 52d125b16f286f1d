"""Who has been let in: how many wait, of which class and tenant, and how many more may."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from llm_serving.admission.answer_lengths import Asked
from llm_serving.admission.appointments import Place
from llm_serving.admission.drain_rate import DrainRate
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import ContextLengthError, RequestError


@dataclass(slots=True)
class Tally:
    """Requests of one class at one replica, or sums of such."""

    num_waiting: int = 0
    """Let in and never scheduled yet."""
    num_waiting_tokens: int = 0
    """Of their prompts."""
    num_owed_tokens: int = 0
    """Of these, that must be computed; the others were computed before, or are about to be."""
    num_running: int = 0
    """Scheduled once and not ended, also while they wait after a preemption."""

    def __iadd__(self, other: Tally) -> Tally:
        self.num_waiting += other.num_waiting
        self.num_waiting_tokens += other.num_waiting_tokens
        self.num_owed_tokens += other.num_owed_tokens
        self.num_running += other.num_running
        return self


class Limit(NamedTuple):
    """One limit as it stands for requests that want to come in together."""

    name: str
    """One of `LIMITS`."""
    key: str
    """Of the YAML."""
    place: Place
    message: str
    """What stands in the way when there is no room."""
    needed: str = ""

    def refusal(self, num_kept: int) -> str:
        """Why there is no room for somebody who has to leave so much to those with appointments."""
        kept = f" and {num_kept} kept for those who were told to come now" if self.place.over <= 0 else ""
        return f"{self.message}{kept} ({self.key}){self.needed}"


LIMITS: Final = ("max_waiting_queue", "max_waiting_tokens", "class_max_waiting", "key_max_waiting")


_UNKNOWN: Final = Asked()
_QUEUE: Final = "queue"
"""Name of the place that all requests share."""


class _Entry(NamedTuple):
    tally: Tally
    replica: int
    class_name: str
    tenant: str
    num_tokens: int
    asked: Asked
    num_cached: int
    """Of its tokens."""

    @property
    def num_owed(self) -> int:
        return self.num_tokens - self.num_cached


class Ahead(NamedTuple):
    """Those who wait, of whom each may get a place before somebody who comes now."""

    entries: list[_Entry]
    num_placed: int
    """Others, that have a place already."""

    @property
    def asked(self) -> list[Asked]:
        return [entry.asked for entry in self.entries]

    @property
    def num_tokens(self) -> int:
        """Of their prompts, to be computed."""
        return sum([entry.num_owed for entry in self.entries])


class WaitingRoom:
    """Counts at the door, on the event loop alone, so that they are exact there.

    A request enters when it is submitted, starts when a step is formed with it for the first time, and leaves when it
    ends. Limits hold for all replicas together.
    """

    def __init__(self, config: ServingConfig, clock: Clock = monotonic) -> None:
        self._tallies: dict[tuple[int, str], Tally] = {}
        """By replica and class."""
        self._of_class: dict[str, Tally] = {}
        """Their sums by class, however many replicas there are."""
        self._waiting: dict[str, _Entry] = {}
        self._waiting_at: dict[int, dict[str, _Entry]] = {}
        """The same by replica."""
        self._running: dict[str, _Entry] = {}
        self._waiting_of_tenant: Counter[str] = Counter()
        self._entered: Counter[int] = Counter()
        """By replica, since the beginning."""
        self._running_of_tenant: Counter[str] = Counter()
        """Of tenants that may run only so many."""
        self._clock = clock
        self._rates: dict[str, DrainRate] = {_QUEUE: DrainRate()}
        """By name of a place: the queue, and those classes and tenants that have a limit of their own."""
        self.reload(config)

    # --- events -----------------------------------------------------------------------------------------------------

    def reload(self, config: ServingConfig) -> None:
        """From now on the limits of another configuration count; whoever has been let in stays."""
        self._max_requests = config.scheduler.max_waiting_queue
        self._max_tokens = config.scheduler.max_waiting_tokens
        self._max_of_tenant = {key.name: key.max_waiting for key in config.api_keys if key.max_waiting is not None}
        self._classes = config.request_classes
        self._max_running = config.scheduler.max_running_per_tenant
        self._max_running_of = {key.name: key.max_running for key in config.api_keys if key.max_running is not None}
        running = self._running.values()
        self._running_of_tenant = Counter(each.tenant for each in running if self.max_running(each.tenant) is not None)
        limited = [_class_place(each.name) for each in config.request_classes if each.max_waiting is not None]
        for place in (*limited, *map(_tenant_place, self._max_of_tenant)):
            self._rates.setdefault(place, DrainRate())

    def enter(
        self,
        request_id: str,
        replica: int,
        request_class: RequestClass,
        tenant: str,
        num_tokens: int,
        asked: Asked = _UNKNOWN,
        num_cached: int = 0,
    ) -> None:
        """The request is submitted; `num_tokens` are those of its prompt, `num_cached` of them need no computing."""
        tally = self._tallies.setdefault((replica, request_class.name), Tally())
        entry = _Entry(tally, replica, request_class.name, tenant, num_tokens, asked, num_cached)
        self._count_waiting(entry, 1)
        self._waiting[request_id] = self._waiting_at.setdefault(replica, {})[request_id] = entry
        self._waiting_of_tenant[tenant] += 1
        self._entered[replica] += 1
        self._note_who_waits(entry)

    def start(self, request_id: str) -> None:
        """The request waits no longer; one that has ended already is left alone."""
        entry = self._take(request_id)
        if entry is not None:
            self._count_running(entry, 1)
            self._running[request_id] = entry
            if self.max_running(entry.tenant) is not None:
                self._running_of_tenant[entry.tenant] += 1

    def leave(self, request_id: str) -> None:
        """The request has ended or is given up; twice changes nothing."""
        self._take(request_id)
        entry = self._running.pop(request_id, None)
        if entry is not None:
            self._count_running(entry, -1)
            if (name := entry.tenant) in self._running_of_tenant:
                self._running_of_tenant[name] -= 1
                if not self._running_of_tenant[name]:
                    del self._running_of_tenant[name]
            now = self._clock()
            for rate in self._rates_of(entry):
                rate.ended(now)

    def hand_over(self, request_id: str, replica: int) -> None:
        """Another replica goes on with a request that has been started; one that has ended is left alone."""
        before = self._running.get(request_id)
        if before is None:
            return
        tally = self._tallies.setdefault((replica, before.class_name), Tally())
        after = self._running[request_id] = before._replace(tally=tally, replica=replica)
        self._count_running(before, -1)
        self._count_running(after, 1)

    def move(self, request_id: str, request_class: RequestClass) -> None:
        """The request is of another class now; one that has ended is left alone."""
        waits = request_id in self._waiting
        entries = self._waiting if waits else self._running
        before = entries.get(request_id)
        if before is None:
            return
        tally = self._tallies.setdefault((before.replica, request_class.name), Tally())
        after = entries[request_id] = before._replace(tally=tally, class_name=request_class.name)
        if waits:
            self._waiting_at[before.replica][request_id] = after
        for each, change in ((before, -1), (after, 1)):
            if waits:
                self._count_waiting(each, change)
                self._note_who_waits(each)
            else:
                self._count_running(each, change)

    def _take(self, request_id: str) -> _Entry | None:
        entry = self._waiting.pop(request_id, None)
        if entry is not None:
            del self._waiting_at[entry.replica][request_id]
            self._count_waiting(entry, -1)
            self._waiting_of_tenant[entry.tenant] -= 1
            self._note_who_waits(entry)
            if self._waiting_of_tenant[entry.tenant] == 0:
                del self._waiting_of_tenant[entry.tenant]
        return entry

    def _count_waiting(self, entry: _Entry, change: int) -> None:
        for tally in (entry.tally, self._of_class.setdefault(entry.class_name, Tally())):
            tally.num_waiting += change
            tally.num_waiting_tokens += change * entry.num_tokens
            tally.num_owed_tokens += change * entry.num_owed

    def _count_running(self, entry: _Entry, change: int) -> None:
        for tally in (entry.tally, self._of_class.setdefault(entry.class_name, Tally())):
            tally.num_running += change

    def _note_who_waits(self, entry: _Entry) -> None:
        now = self._clock()
        self._rates[_QUEUE].waits(now, bool(self._waiting))
        if (rate := self._rates.get(_class_place(entry.class_name))) is not None:
            rate.waits(now, self.class_load(entry.class_name).num_waiting > 0)
        if (rate := self._rates.get(_tenant_place(entry.tenant))) is not None:
            rate.waits(now, self._waiting_of_tenant[entry.tenant] > 0)

    def _rates_of(self, entry: _Entry) -> list[DrainRate]:
        names = (_QUEUE, _class_place(entry.class_name), _tenant_place(entry.tenant))
        return [self._rates[name] for name in names if name in self._rates]

    # --- questions --------------------------------------------------------------------------------------------------

    def load(self, *, replicas: Iterable[int] | None = None, max_rank: int | None = None) -> Tally:
        """What is there, of these replicas and of classes up to this rank; None: of all."""
        names = self._names_up_to(max_rank)
        if replicas is None:
            tallies = map(self._of_class.get, names)
        else:
            tallies = map(self._tallies.get, itertools.product(replicas, names))
        total = Tally()
        for tally in tallies:
            if tally is not None:
                total += tally
        return total

    def _names_up_to(self, max_rank: int | None) -> list[str]:
        return [each.name for each in self._classes if max_rank is None or each.rank <= max_rank]

    def num_entered(self, replica: int) -> int:
        """Requests that were submitted to a replica since the beginning."""
        return self._entered[replica]

    def ahead(self, replica: int, max_rank: int | None, placed: Container[str] = ()) -> Ahead:
        """Those who wait at a replica, of classes up to this rank (None: of all), in order of arrival.

        Left out are those `placed`, who have a place, which has not been told here yet, and those beyond what their
        tenant may run, who are in nobody's way but its own.
        """
        names = self._names_up_to(max_rank)
        ahead = _ahead(self._waiting_at.get(replica, {}), placed, lambda entry: entry.class_name in names)
        if self._max_running is not None or self._max_running_of:
            return ahead._replace(entries=list(self._that_may_run(ahead.entries)))
        return ahead

    def ahead_of_tenant(self, tenant: str, placed: Container[str] = ()) -> Ahead:
        """Those of a tenant who wait, at whatever replica; left out are those `placed`."""
        return _ahead(self._waiting, placed, lambda entry: entry.tenant == tenant)

    def _that_may_run(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        passed = self._running_of_tenant.copy()
        for entry in entries:
            most = self.max_running(entry.tenant)
            if most is None or passed[entry.tenant] < most:
                passed[entry.tenant] += 1
                yield entry

    def max_running(self, tenant: str) -> int | None:
        """Most requests of the tenant that run at once; None: no limit."""
        return self._max_running_of.get(tenant, self._max_running)

    def num_running_of(self, tenant: str) -> int:
        """Running requests of a tenant that has such a limit."""
        return self._running_of_tenant[tenant]

    def class_load(self, name: str) -> Tally:
        """What is there of one class."""
        return replace(self._of_class.get(name, Tally()))

    def check_group(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> None:
        """Raises RequestError for requests that, asked for together, would not fit even if nothing waited."""
        for limit in self._request_limits(num_requests, request_class, tenant):
            if num_requests > limit.place.limit:
                rule = f"must ask for at most {limit.place.limit} answers at once ({limit.key})"
                raise RequestError("n", rule, num_requests)
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            rule = f"must be, once for each answer, at most {self._max_tokens} tokens"
            raise ContextLengthError("prompt", f"{rule} (scheduler_config.max_waiting_tokens)", num_tokens)

    def limits(self, num_requests: int, num_tokens: int, request_class: RequestClass, tenant: str) -> list[Limit]:
        """All that so many more requests with so many prompt tokens together must keep within."""
        limits = self._request_limits(num_requests, request_class, tenant)
        if self._max_tokens is not None:
            total, rate = self.load(), limits[0].place.rate
            mean = total.num_waiting_tokens / max(1, total.num_waiting)
            rate = None if rate is None or mean == 0 else rate * mean
            place = Place("tokens", total.num_waiting_tokens, self._max_tokens, num_tokens, rate)
            message = f"{place.taken} of {place.limit} prompt tokens wait in the queue"
            key = "scheduler_config.max_waiting_tokens"
            limits.append(Limit("max_waiting_tokens", key, place, message, f"; {num_tokens} needed"))
        return limits

    def _request_limits(self, num_requests: int, request_class: RequestClass, tenant: str) -> list[Limit]:
        place = self._place(_QUEUE, len(self._waiting), self._max_requests, num_requests)
        limits = [_limit("max_waiting_queue", "scheduler_config.max_waiting_queue", place)]
        if (most := request_class.max_waiting) is not None:
            name = request_class.name
            place = self._place(_class_place(name), self.class_load(name).num_waiting, most, num_requests)
            limits.append(
                _limit("class_max_waiting", f"request_classes.{name}.max_waiting", place, f" of class {name}")
            )
        if (most := self._max_of_tenant.get(tenant)) is not None:
            place = self._place(_tenant_place(tenant), self._waiting_of_tenant[tenant], most, num_requests)
            limits.append(_limit("key_max_waiting", f"api_keys.{tenant}.max_waiting", place, f" of {tenant}"))
        return limits

    def _place(self, name: str, taken: int, limit: int, amount: int) -> Place:
        return Place(name, taken, limit, amount, self._rates[name].per_second(self._clock()))


def _ahead(waiting: Mapping[str, _Entry], placed: Container[str], counts: Callable[[_Entry], bool]) -> Ahead:
    found = [(request_id in placed, entry) for request_id, entry in waiting.items() if counts(entry)]
    chosen = [entry for has_place, entry in found if not has_place]
    return Ahead(chosen, len(found) - len(chosen))


def _limit(name: str, key: str, place: Place, whose: str = "") -> Limit:
    message = f"{place.taken} of {place.limit} places{whose} in the queue are taken"
    return Limit(name, key, place, message, f"; {place.amount} needed")


def _class_place(name: str) -> str:
    return f"class {name}"


def _tenant_place(name: str) -> str:
    return f"key {name}"
