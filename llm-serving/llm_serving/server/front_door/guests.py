"""Who is connected, and what they make the server hold."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection
from typing import Final, Protocol

MADE_FREE_AT_ONCE: Final = 32
"""When there is no place left, one connection of so many is ended: looking for them takes time too."""


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

    def end(self) -> None:
        """Ends it at once, without an answer."""

    def unburden(self) -> None:
        """Ends it for the bytes it holds, with an answer where there can be one; its weight is 0 then."""


class Guests:
    """Counts connections and the bytes that wait in them.

    Where a place is missing, those make room that do not wait for an answer: silent, idle or slow to send, the longest
    connected of the most numerous address first. Nobody who has not been heard yet goes for another of its own address,
    and for one of another address only when there is nobody else: it may have sent all of its request.

    Where there are too many bytes, whoever holds most goes.

    Args:
        max_connections: In all.
        max_per_address: From one address; of IPv6, from one network of 64 bits.
        max_bytes: Most bytes that wait in all connections together.
    """

    def __init__(self, max_connections: int, max_per_address: int, max_bytes: int) -> None:
        self.reload(max_connections, max_per_address, max_bytes)
        self._guests: dict[Guest, None] = {}
        self._by_address: dict[str, dict[Guest, None]] = {}
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
        own = self._by_address.get(guest.address, {})
        if len(own) >= self._max_per_address and not self._make_room(own, heard=True):
            return False
        if len(self._guests) >= self._max_connections:
            most = max(self._by_address.values(), key=len)
            among = ((most, True), (self._guests, True), *([] if most is own else [(most, False)]))
            if not any(self._make_room(guests, heard=heard) for guests, heard in among):
                return False
        self._guests[guest] = None
        self._by_address.setdefault(guest.address, {})[guest] = None
        return True

    def leave(self, guest: Guest) -> None:
        """Forgets a guest; does nothing where that was done."""
        if guest not in self._guests:
            return
        self.num_bytes -= guest.weight
        guest.weight = 0
        del self._guests[guest]
        own = self._by_address[guest.address]
        del own[guest]
        if not own:
            del self._by_address[guest.address]

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

    def _make_room(self, among: Collection[Guest], *, heard: bool) -> bool:
        spared = [guest for guest in among if not guest.is_served and (guest.is_heard or not heard)]
        for guest in spared[: max(1, len(among) // MADE_FREE_AT_ONCE)]:
            self.leave(guest)
            guest.end()
        return bool(spared)


def address_of(peer: object) -> str:
    """What of a peer's socket address counts as one address."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
