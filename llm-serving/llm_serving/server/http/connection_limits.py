"""Limits over all connections: how many there are, from one address and in all, and how many bytes they hold."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Final

from llm_serving.server.http.request_head import TOO_MANY_BYTES

if TYPE_CHECKING:
    from llm_serving.server.http.connection import Connection

MAX_RETRY_AFTER_S: Final = 8


class ConnectionLimits:
    """Counts connections and their bytes. Where a limit is reached, an idle, silent or slow connection is closed.

    An address with many connections loses its own before it can take the place of an address with fewer.

    Args:
        max_connections: In all.
        max_per_address: Of one address; of IPv6, of one network of 64 bits.
        max_bytes: Bytes that all connections together may hold.
        on_refused: Called with the address and status of every response to what never became a request.
    """

    def __init__(
        self, max_connections: int, max_per_address: int, max_bytes: int, on_refused: Callable[[str, int], None]
    ) -> None:
        self.reload(max_connections, max_per_address, max_bytes)
        self.on_refused = on_refused
        self.num_bytes = 0
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._num_connections = 0

    def reload(self, max_connections: int, max_per_address: int, max_bytes: int) -> None:
        """Change the limits; existing connections stay."""
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return self._num_connections

    def admit(self, connection: Connection) -> bool:
        """Count a connection, unless a limit is reached and no other connection can be closed."""
        own = self._by_address.get(connection.address, {})
        if len(own) >= self._max_per_address and not self._close_one(own):
            return False
        if self._num_connections >= self._max_connections:
            largest = sorted(self._by_address.values(), key=len, reverse=True)
            larger = [group for group in largest if group is own or len(group) > len(own)]
            if not any(map(self._close_one, larger)):
                return False
        self._by_address.setdefault(connection.address, own)[connection] = None
        self._num_connections += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection; does nothing if it is not counted."""
        group = self._by_address.get(connection.address, {})
        if connection not in group:
            return
        self.num_bytes -= connection.weight
        connection.weight = 0
        self._num_connections -= 1
        del group[connection]
        if not group:
            del self._by_address[connection.address]

    def weigh(self, connection: Connection, weight: int) -> None:
        """Note how many bytes a connection holds; refuse the heaviest ones while all together hold too many."""
        if connection not in self._by_address.get(connection.address, ()):
            return
        self.num_bytes += weight - connection.weight
        connection.weight = weight
        while self.num_bytes > self._max_bytes:
            heaviest = max(self._all(), key=lambda each: each.weight)
            self.num_bytes -= heaviest.weight
            heaviest.weight = 0
            heaviest.refuse(TOO_MANY_BYTES)

    def abort_all(self) -> None:
        """End all connections."""
        for connection in list(self._all()):
            connection.abort()

    def _all(self) -> Iterator[Connection]:
        return (connection for group in self._by_address.values() for connection in group)

    def retry_after_s(self) -> int:
        """Return seconds after which a refused client may try again, random so that not all come at once."""
        return random.randint(1, MAX_RETRY_AFTER_S)

    def _close_one(self, group: Collection[Connection]) -> bool:
        """Close the oldest connection of a group that nobody waits for."""
        for connection in group:
            if not (connection.is_busy or connection.has_unread):
                self.remove(connection)
                connection.abort()
                return True
        return False


def address_of(peer: object) -> str:
    """Return what counts as one address of a peer's socket address."""
    return network_of(str(peer[0]) if isinstance(peer, tuple) and peer else "")


def network_of(host: str) -> str:
    """Return an address of IPv4, or the network of 64 bits of an address of IPv6, which is one customer's."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
