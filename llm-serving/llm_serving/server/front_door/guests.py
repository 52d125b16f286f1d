"""Who is connected, and what they make the server hold."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from llm_serving.core.timings import Clock, monotonic
from llm_serving.server.front_door.comebacks import Comebacks

MADE_FREE_AT_ONCE: Final = 32
"""When there is no place left, one connection of so many is ended: looking for them takes time too."""
SEARCH_PAUSE_S: Final = 0.02
"""Seconds without another search where one found nobody who can be spared: among hundreds it takes most of a
millisecond, and there are the most newcomers where there is the least room."""


class Guest(Protocol):
    """A connection, from before its handshake."""

    address: str
    weight: int
    """Bytes of it that wait: received and not handed over, or written and not taken."""

    @property
    def is_served(self) -> bool:
        """Whether it waits for an answer to a request that it has sent to the end, or takes that answer."""

    @property
    def is_heard(self) -> bool:
        """Whether all that has come from it was looked at."""

    @property
    def is_idle(self) -> bool:
        """Whether it was answered, and has begun nothing since: its client knows that it may end."""

    def end(self) -> None:
        """Ends it at once, without an answer."""

    def unburden(self) -> None:
        """Ends it for the bytes it holds, with an answer where there can be one; its weight is 0 then."""


@dataclass
class _Crowd:
    """Those of one address, and those of it who were turned away."""

    comebacks: Comebacks
    guests: dict[Guest, None] = field(default_factory=dict)
    paused_until: float = 0.0
    """Until then nobody makes room for another of them."""


class Guests:
    """Counts connections and the bytes that wait in them.

    Where a place is missing, those make room that do not wait for an answer: silent, idle or slow to send, the longest
    connected of the most numerous address first. Nobody who has not been heard yet goes for another of its own address,
    and for one of another address only when there is nobody else: it may have sent all of its request.

    Whoever comes from an address with many takes no place from one with fewer, but of those that are idle: a crowd,
    whatever it does, cannot end the handshake or the request that another has begun.

    Where there are too many bytes, whoever holds most goes.

    Args:
        max_connections: In all.
        max_per_address: From one address; of IPv6, from one network of 64 bits.
        max_bytes: Most bytes that wait in all connections together.
        clock: Seconds.
    """

    def __init__(self, max_connections: int, max_per_address: int, max_bytes: int, clock: Clock = monotonic) -> None:
        self.reload(max_connections, max_per_address, max_bytes)
        self._guests: dict[Guest, None] = {}
        self._clock = clock
        self._crowds: dict[str, _Crowd] = {}
        self._strangers = _Crowd(Comebacks(clock()))
        """Of addresses from which there is nobody."""
        self.num_bytes = 0
        self.on_refused: Callable[[str, int], None] = lambda address, status: None
        """Told of the address and status of every answer to what never became a request."""

    def reload(self, max_connections: int, max_per_address: int, max_bytes: int) -> None:
        """From now on these are the limits; whoever is in stays."""
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._guests)

    def admit(self, guest: Guest) -> bool:
        """Takes a guest in, unless there is no place and nobody can be spared."""
        now = self._clock()
        own = self._crowds.get(guest.address)
        if self._is_full_for(own):
            asking = own or self._strangers
            if now < asking.paused_until:
                return False
            if not self._make_room_for(own):
                asking.paused_until = now + SEARCH_PAUSE_S
                return False
        (own or self._strangers).comebacks.got_place(now)
        if own is None or not own.guests:  # a crowd is forgotten with the last of it, who may have made room
            own = self._crowds[guest.address] = own or _Crowd(Comebacks(now))
        self._guests[guest] = own.guests[guest] = None
        return True

    def seconds_to_comeback(self, address: str) -> int:
        """Whole seconds after which one of this address, who was turned away, is to try again."""
        return self._crowds.get(address, self._strangers).comebacks.seconds(self._clock())

    def leave(self, guest: Guest) -> None:
        """Forgets a guest; does nothing where that was done."""
        if guest not in self._guests:
            return
        self.num_bytes -= guest.weight
        guest.weight = 0
        del self._guests[guest]
        own = self._crowds[guest.address].guests
        del own[guest]
        if not own:
            del self._crowds[guest.address]

    def weigh(self, guest: Guest, weight: int) -> None:
        """Notes how many bytes wait in a connection."""
        if guest not in self._guests:
            return
        self.num_bytes += weight - guest.weight
        guest.weight = weight
        while self.num_bytes > self._max_bytes:
            heaviest = max(self._guests, key=lambda each: each.weight)
            heaviest.unburden()
            self.num_bytes -= heaviest.weight
            heaviest.weight = 0

    def _is_full_for(self, own: _Crowd | None) -> bool:
        is_own_full = own is not None and len(own.guests) >= self._max_per_address
        return is_own_full or len(self._guests) >= self._max_connections

    def _make_room_for(self, own: _Crowd | None) -> bool:
        """For one more of an address, from which others are here or are not."""
        num_own = 0 if own is None else len(own.guests)
        if own is not None and num_own >= self._max_per_address and not self._make_room(own.guests, _is_heard):
            return False
        if len(self._guests) < self._max_connections:
            return True

        def may_go(guest: Guest) -> bool:
            crowd = self._crowds[guest.address]
            return guest.is_heard and (guest.is_idle or crowd is own or len(crowd.guests) > num_own)

        most = max(self._crowds.values(), key=lambda each: len(each.guests))
        if self._make_room(most.guests, may_go) or self._make_room(self._guests, may_go):
            return True
        return len(most.guests) > num_own and self._make_room(most.guests, lambda guest: True)

    def _make_room(self, among: Collection[Guest], may_go: Callable[[Guest], bool]) -> bool:
        spared = [guest for guest in among if not guest.is_served and may_go(guest)]
        for guest in spared[: max(1, len(among) // MADE_FREE_AT_ONCE)]:
            self.leave(guest)
            guest.end()
        return bool(spared)


def _is_heard(guest: Guest) -> bool:
    return guest.is_heard


def address_of(peer: object) -> str:
    """What of a peer's socket address counts as one address."""
    return network_of(str(peer[0]) if isinstance(peer, tuple) and peer else "")


def network_of(host: str) -> str:
    """What of an address is one customer's: of IPv6 the first half."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
