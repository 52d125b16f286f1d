"""Those who were told to come back, and when: a refusal is an appointment.

Retry-After is all that ordinary clients heed, so nothing is handed out: who comes back is known by asking the same
again from the same place (`Visitor`). Nothing rests on anybody's word. No place is kept for an appointment longer than
`GRACE_S` after its time, a source that keeps few of its appointments has them counted for little, none may book the
whole of what the server can do, and the book has a fixed size. It is not saved: with the process its queue is gone too.

What counts is when somebody came, not when the event loop came to hear it: a busy server makes nobody late.

Of two clients who ask the same from the same place, the one that comes first has the appointment. Some libraries say
how often they have tried: where those who come back say so, whoever says that this is the first time was not told to.
The same libraries wait to the millisecond. Whoever waits for whole seconds comes back at its own fraction of one, so
that those who were refused together come together ever after; appointments of the others are spread over each second.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

HORIZON_S: Final = 120
"""Clients in use wait no longer than this; whoever would have to gets no appointment."""
GRACE_S: Final = 1.0
"""After its time an appointment holds so long."""
EARLY_S: Final = 0.05
"""And before."""
UNHEARD_S: Final = 4.0
"""Who came in time may wait so long until it is heard; until then its appointment is remembered."""
BOOKED_SHARE: Final = 0.9
"""Of what the server has done lately; the rest makes up for times in which it does less, and is for newcomers."""
MAX_APPOINTMENTS: Final = 1 << 15
MAX_OF_VISITOR: Final = 16
"""Outstanding appointments for one and the same request of one source."""
MAX_SOURCES: Final = 1 << 12
"""Remembered beside those with appointments outstanding."""
SHARE_OF_ONE: Final = 0.95
"""Of what is booked, for a source that is alone in the book ..."""
SHARE_AMONG_OTHERS: Final = 0.5
"""... and for one that is not."""
MIN_OF_SOURCE: Final = 16
"""Outstanding appointments from which on a source is held to its share."""
LEAST_WEIGHT: Final = 0.05
"""Of an appointment whose source has kept none."""
_MEMORY: Final = 32
"""Appointments of a source after which one counts 1/e."""
_BUCKETS_PER_S: Final = 4
_NUM_BUCKETS: Final = 1024
"""Enough for the horizon, the grace, those who have not been heard yet and the one that is under way."""
_AGAIN: Final = "\0"
"""No source has this name."""
_ROUNDING: Final = 1e-6
"""Sums of what is expected are right to this."""
_LAST: Final = _BUCKETS_PER_S * HORIZON_S
_FUTURE: Final = _BUCKETS_PER_S * (HORIZON_S + 2)
_SPREAD: Final = (math.sqrt(5.0) - 1.0) / 2.0
"""Of a bucket, from one appointment to the next: the multiples of the golden ratio leave no large gap."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who asks for what. The same again: the same client with the same request, as far as anybody can tell."""

    source: str = ""
    """Who answers for it: the name of an API key, or an address."""
    key: bytes = b""
    """Of the request; empty: it cannot be recognized, and gets no appointment."""
    says_again: bool | None = field(default=None, compare=False)
    """Whether it says that it has been refused before; None: it says nothing of that."""


class Place(NamedTuple):
    """A limit at the door as it stands for one request."""

    name: str
    """Of the limit, and of whoever it is for."""
    taken: int
    limit: int
    amount: int
    """Of it, that the request needs."""
    rate: float | None
    """Of it, that gets free in a second while somebody waits; None: not known."""

    @property
    def over(self) -> int:
        """By how much it would exceed the limit, whoever has appointments."""
        return self.taken + self.amount - self.limit

    @property
    def most_kept(self) -> int:
        """Of it, that is kept for appointments at most: so newcomers always find the other half."""
        return self.limit // 2


@dataclass(eq=False, slots=True)
class Appointment:
    visitor: Visitor
    due: float
    amounts: Mapping[str, int]
    """By name of a place."""
    again: bool = False
    """Of one that has kept an appointment already and found no room."""
    over: bool = False
    passed_by: bool = False
    """Somebody came in time and said that it was the first."""


@dataclass(slots=True)
class _Source:
    kept: float
    """Share of its appointments that it keeps."""
    weight: float
    """What its appointments count: that share, when it had last changed by half."""
    outstanding: set[Appointment] = field(default_factory=set)
    is_large: bool = False
    """Whether it is held to its share."""
    says_again: float = 0.5
    """Share of those who keep its appointments, and say whether they have been refused before, that say so."""


class AppointmentBook:
    """How much is expected of whom in every quarter of a second, for each place at the door.

    Times are seconds on one clock that never goes back.
    """

    def __init__(self) -> None:
        self.num_kept = 0
        """Appointments whose visitor came in time, let in or not."""
        self.num_missed = 0
        """Appointments whose visitor did not."""
        self._expected: dict[str | tuple[str, str], list[float]] = {}
        """By place, in a ring of buckets: of it, what is expected then; also by (place, source) for large ones, and by
        (place, `_AGAIN`) for those who come again."""
        self._by_visitor: dict[Visitor, list[Appointment]] = {}
        """Ascending by time."""
        self._sources: dict[str, _Source] = {}
        self._idle: dict[str, None] = {}
        """Those of them without an appointment outstanding, the longest first."""
        self._kept = 1.0
        """Share of all appointments that is kept."""
        self._expiries: list[tuple[float, int, Appointment]] = []
        self._order = itertools.count()
        self._phase = 0.0
        """Within a bucket, of the last appointment to the millisecond."""
        self._num_outstanding = 0

    def __len__(self) -> int:
        return self._num_outstanding

    # --- events -----------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Strikes out what has expired; call it before anything is asked."""
        while self._expiries and self._expiries[0][0] <= now:
            appointment = heapq.heappop(self._expiries)[2]
            if not appointment.over:
                self.num_missed += 1
                if appointment.passed_by:
                    self._hear(appointment.visitor.source, says_again=False)
                self._end(appointment, came=False)

    def make(self, visitor: Visitor, due: float, places: Sequence[Place], *, again: bool = False) -> None:
        """Expects the visitor at `due`, at most `HORIZON_S` ahead, in all the places it needs.

        It comes `again` if it has kept an appointment already and found no room.

        Nothing is written for a visitor that cannot be recognized, that has enough appointments, or beyond the size of
        the book.
        """
        own = self._by_visitor.get(visitor, ())
        if not visitor.key or len(own) >= MAX_OF_VISITOR or self._num_outstanding >= MAX_APPOINTMENTS:
            return
        source = self._source_to_expect(visitor.source)
        amounts = {place.name: place.amount for place in places}
        appointment = Appointment(visitor, due, amounts, again)
        source.outstanding.add(appointment)
        self._num_outstanding += 1
        self._by_visitor[visitor] = sorted((*own, appointment), key=lambda each: each.due)
        self._expect(appointment, source.weight)
        if len(source.outstanding) == MIN_OF_SOURCE and not source.is_large:
            self._hold_to_its_share(visitor.source, source)
        heapq.heappush(self._expiries, (due + GRACE_S + UNHEARD_S, next(self._order), appointment))

    def keep(self, appointment: Appointment, says_again: bool | None = None) -> None:
        """Its visitor has come in time, and says this of itself."""
        self.num_kept += 1
        if says_again is not None:
            self._hear(appointment.visitor.source, says_again)
        self._end(appointment, came=True)

    # --- questions --------------------------------------------------------------------------------------------------

    def due(self, visitor: Visitor, came: float) -> Appointment | None:
        """The appointment that the visitor keeps by having come then."""
        own = self._by_visitor.get(visitor, ())
        found = next((each for each in own if each.due - EARLY_S <= came < each.due + GRACE_S), None)
        if found is not None and visitor.says_again is False and self._sources[visitor.source].says_again > 0.5:
            found.passed_by = True
            return None
        return found

    def remaining_s(self, visitor: Visitor, now: float) -> int | None:
        """Whole seconds to its last appointment, of a visitor that gets no further one."""
        own = self._by_visitor.get(visitor, [])
        return max(1, math.ceil(own[-1].due - now)) if len(own) >= MAX_OF_VISITOR else None

    def num_kept_free(self, place: Place, came: float, now: float) -> int:
        """Of the place, what a newcomer must leave to those who are expected before it would be out of the way.

        That are those too who may have come before it and be heard after it.
        """
        expected = self._expected.get(place.name)
        if expected is None or place.most_kept == 0:
            return 0
        until_s = HORIZON_S if place.rate is None else min(HORIZON_S, place.limit / place.rate)
        first, last = self._bucket(came - GRACE_S), self._bucket(now + until_s)
        num = math.fsum(_part(expected, first, last - first + 1))
        return min(place.most_kept, math.ceil(num - _ROUNDING))

    def seconds_until_free(
        self,
        places: Sequence[Place],
        source: str,
        now: float,
        least_s: float = 1.0,
        *,
        again: bool = False,
        is_exact: bool = False,
    ) -> float:
        """Seconds, at least `least_s` and one, after which all places have room for one more.

        They are whole ones, unless whoever is told so `is_exact`.

        Each place gets free at its rate; newcomers fill what is not kept, and of what is kept those who are expected
        may take half, so that a slower second turns nobody away. Who comes `again` gets the first time that is left by
        others who do, before all whom the server expects besides. More than `HORIZON_S` means: longer than that.
        """
        unit = 1 if is_exact else _BUCKETS_PER_S
        bucket = unit * math.ceil(max(1.0, least_s - 0.001) * _BUCKETS_PER_S / unit)
        own = self._sources.get(source)
        alone = own is None or len(own.outstanding) == self._num_outstanding
        share = SHARE_OF_ONE if alone else SHARE_AMONG_OTHERS
        backlogs = []
        for place in places:
            rate = BOOKED_SHARE * (place.rate or max(1.0, place.limit / 2))
            most = max(place.most_kept / 2, place.amount) - place.amount
            taken = max(0, place.taken - (place.limit - place.most_kept))
            if again:
                backlogs.append(_Backlog(taken, self._expected_from((place.name, _AGAIN), now), rate, most))
                continue
            backlogs.append(_Backlog(taken, self._expected_from(place.name, now), rate, most))
            if (place.name, source) in self._expected:
                backlogs.append(_Backlog(0, self._expected_from((place.name, source), now), share * rate, most))
        latest = -1
        while latest < bucket <= _LAST:  # until all agree
            latest = bucket
            for backlog in backlogs:
                bucket = backlog.first_with_room(bucket, unit)
        if not is_exact:
            return bucket // _BUCKETS_PER_S
        self._phase = (self._phase + _SPREAD) % 1.0
        return (bucket + self._phase) / _BUCKETS_PER_S

    def _expected_from(self, name: str | tuple[str, str], now: float) -> list[float]:
        """What is expected in each bucket from the one under way on; those who are late are expected in that."""
        expected = self._expected.get(name)
        if expected is None:
            return [0.0] * _FUTURE
        first, late = self._bucket(now), self._bucket(now - GRACE_S)
        ahead = _part(expected, first, _FUTURE)
        ahead[0] += math.fsum(_part(expected, late, first - late))
        return ahead

    # --- the ring ---------------------------------------------------------------------------------------------------

    def _end(self, appointment: Appointment, came: bool) -> None:
        appointment.over = True
        visitor = appointment.visitor
        own = self._by_visitor[visitor]
        own.remove(appointment)
        if not own:
            del self._by_visitor[visitor]
        source = self._sources[visitor.source]
        source.outstanding.remove(appointment)
        self._expect(appointment, -source.weight)
        source.kept += (came - source.kept) / _MEMORY
        self._kept += (came - self._kept) / _MEMORY
        self._num_outstanding -= 1
        self._reweigh(source)
        if not source.outstanding:
            self._rest(visitor.source, source)
        if self._num_outstanding == 0:
            self._expected.clear()  # and with it what rounding has left

    def _hear(self, name: str, says_again: bool) -> None:
        """What somebody of that source says who has come when it was told to."""
        source = self._sources[name]
        source.says_again += (says_again - source.says_again) / _MEMORY

    def _reweigh(self, source: _Source) -> None:
        """Follows what a source has come to; by halves, so that a long list is gone through a few times only."""
        weight = max(LEAST_WEIGHT, source.kept)
        if source.weight / 2 < weight < source.weight * 2 and weight < 1.0 - 1.0 / _MEMORY:
            return
        if weight != source.weight:
            for appointment in source.outstanding:
                self._expect(appointment, weight - source.weight)
            source.weight = weight

    def _expect(self, appointment: Appointment, weight: float) -> None:
        bucket, source = self._bucket(appointment.due) % _NUM_BUCKETS, appointment.visitor.source
        for name, amount in appointment.amounts.items():
            self._ring(name)[bucket] += weight * amount
            if appointment.again:
                self._ring((name, _AGAIN))[bucket] += weight * amount
            if self._sources[source].is_large:
                self._ring((name, source))[bucket] += weight * amount

    def _ring(self, name: str | tuple[str, str]) -> list[float]:
        if name not in self._expected:
            self._expected[name] = [0.0] * _NUM_BUCKETS
        return self._expected[name]

    def _hold_to_its_share(self, name: str, source: _Source) -> None:
        """Begins to count what is expected of a source that has become large, in every place that it ever wants."""
        source.is_large = True
        for appointment in source.outstanding:
            for place, amount in appointment.amounts.items():
                self._ring((place, name))[self._bucket(appointment.due) % _NUM_BUCKETS] += source.weight * amount

    def _source_to_expect(self, name: str) -> _Source:
        """One of which an appointment becomes outstanding."""
        self._idle.pop(name, None)
        if (source := self._sources.get(name)) is None:
            source = self._sources[name] = _Source(self._kept, max(LEAST_WEIGHT, self._kept))
        return source

    def _rest(self, name: str, source: _Source) -> None:
        """The source has no appointment outstanding any more; it is remembered for a while."""
        if source.is_large:
            source.is_large = False
            for ring in [each for each in self._expected if isinstance(each, tuple) and each[1] == name]:
                del self._expected[ring]
        self._idle[name] = None
        if len(self._idle) > MAX_SOURCES:
            longest = next(iter(self._idle))
            del self._idle[longest], self._sources[longest]

    @staticmethod
    def _bucket(time: float) -> int:
        return math.floor(time * _BUCKETS_PER_S)


def _part(ring: list[float], first: int, count: int) -> list[float]:
    """`count` buckets from number `first` on, which counts through all rounds of the ring."""
    begin = first % _NUM_BUCKETS
    end = begin + count
    return ring[begin:end] if end <= _NUM_BUCKETS else ring[begin:] + ring[: end - _NUM_BUCKETS]


class _Backlog:
    """How many of those who are expected are still in a place at the end of each bucket from the one under way on.

    Args:
        taken: Of what is kept, at the beginning.
        expected: In each bucket; late ones in the first.
        rate: At which it gets free; nobody saves up what nobody takes.
        most: There may be so many; with one more of them there is none too many.
    """

    def __init__(self, taken: float, expected: list[float], rate: float, most: float) -> None:
        self._level = float(taken)
        self._expected = expected
        self._per_bucket = rate / _BUCKETS_PER_S
        self._most = most + _ROUNDING
        self._num_seen = 0
        self._from = 0
        """Since this bucket there has been room in all that were looked at."""
        self._until = 0
        """Before this bucket, and since `_from`, one more is gone again before there is no room."""

    def first_with_room(self, bucket: int, unit: int) -> int:
        """The first bucket from that one on, of each `unit` one, with room for one more, then and until all have gone.

        Ask for later and later ones; beyond `_LAST` where there is none.
        """
        while bucket <= _LAST:
            if bucket < self._from:
                bucket = -(-self._from // unit) * unit
            elif bucket < self._until or self._num_seen == _FUTURE:
                return bucket
            else:
                self._look_on()
        return max(bucket, _LAST + unit)

    def _look_on(self) -> None:
        """To the end of the next bucket in which nobody is left or one more would be too many."""
        level, per_bucket, most = self._level, self._per_bucket, self._most
        for number in range(self._num_seen, _FUTURE):
            level += self._expected[number] - per_bucket
            if level <= _ROUNDING:
                self._level, self._num_seen, self._until = 0.0, number + 1, number + 1
                return
            if level > most:
                self._level, self._num_seen, self._from = level, number + 1, number + 1
                return
        self._num_seen = _FUTURE
