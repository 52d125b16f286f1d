"""Accepts connections within the limits, does their TLS handshakes, and counts the bytes that they buffer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
import ssl
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llm_serving.config.sections.server import ServerConfig
from llm_serving.log import get_logger
from llm_serving.server.http.request import TOO_MANY_BYTES, TOO_MANY_CONNECTIONS
from llm_serving.server.http.tls import TlsRecords

if TYPE_CHECKING:
    from llm_serving.server.http.connection import Connection

logger = get_logger(__name__)

ACCEPTED_AT_ONCE: Final = 64
EXHAUSTED_PAUSE_S: Final = 0.25
"""Seconds until the next attempt if the process has no free file descriptor."""
HANDSHAKES_AT_ONCE: Final = 2
"""Maximum number of TLS handshakes, of about 1 ms each, begun in one iteration of the event loop."""
ESTABLISHED: Final = 1
"""State of an open TCP connection in Linux's `tcp_states.h`."""
MAX_RETRY_AFTER_S: Final = 8


class ConnectionLimits:
    """Limits the number of connections, in total and for each address, and the bytes that all connections buffer. An
    IPv6 address counts as its /64 network. A new connection above a limit replaces an idle one: of the same address,
    or, at the total limit, of the address with the most connections. `on_refused(address, status)` is called for each
    refused connection or request head.
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
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return self._num_connections

    def admit(self, connection: Connection) -> bool:
        """Count a connection. Return False if a limit is reached and no other connection can be closed."""
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
        """Stop counting a connection. A second call has no effect."""
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
        """Record how many bytes a connection buffers. If the total is too large, close the largest connections."""
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
        for connection in list(self._all()):
            connection.abort()

    def _all(self) -> Iterator[Connection]:
        return (connection for group in self._by_address.values() for connection in group)

    def retry_after_s(self) -> int:
        """Return a random number of seconds, so that refused clients do not all retry at the same time."""
        return random.randint(1, MAX_RETRY_AFTER_S)

    def _close_one(self, group: Collection[Connection]) -> bool:
        """Close the oldest connection in `group` that is idle without unread bytes. Return False if there is none."""
        for connection in group:
            if not (connection.is_busy or connection.has_unread):
                self.remove(connection)
                connection.abort()
                return True
        return False


@dataclass(eq=False)
class Acceptor:
    """Accepts connections, with TLS if there is a certificate, and has the interface of asyncio's servers. At most
    `HANDSHAKES_AT_ONCE` TLS handshakes begin in one iteration of the event loop, one of each address in turn, so that a
    client with many handshakes does not delay others. If no file descriptor is free, connections wait in the kernel.
    """

    listener: socket.socket
    """The caller closes this socket."""
    registry: ConnectionLimits
    new_connection: Callable[[ServerConfig, ConnectionLimits, str, socket.socket], Connection]
    context: ssl.SSLContext | None
    limits: ServerConfig
    """Limits of new connections. They may be replaced later."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _handshakes: set[asyncio.Task[Any]] = field(default_factory=set)
    _waiting: dict[str, deque[tuple[Connection, socket.socket]]] = field(default_factory=dict)
    """Address -> connections whose TLS handshake has not begun. The first address is next."""
    _pause: asyncio.TimerHandle | None = None
    _is_exhausted: bool = False

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self._loop.add_reader(self.listener, self._accept)

    def close(self) -> None:
        """Stop accepting connections and end handshakes. Established connections stay."""
        self._loop.remove_reader(self.listener)
        if self._pause is not None:
            self._pause.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        for queue in self._waiting.values():
            for connection, client in queue:
                _drop(connection, client)
        self._waiting.clear()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, peer = self.listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client has disconnected already
                continue
            except OSError as error:  # retrying at once would keep a core busy
                if not self._is_exhausted:
                    logger.error(
                        "the server cannot accept new connections: %s; they wait in the kernel", error.strerror
                    )
                self._is_exhausted = True
                self._loop.remove_reader(self.listener)
                self._pause = self._loop.call_later(
                    EXHAUSTED_PAUSE_S, self._loop.add_reader, self.listener, self._accept
                )
                return
            if self._is_exhausted:
                self._is_exhausted = False
                logger.warning("the server accepts new connections again")
            client.setblocking(False)
            self._admit(client, network_of(str(peer[0]) if peer else ""))

    def _admit(self, client: socket.socket, address: str) -> None:
        connection = self.new_connection(self.limits, self.registry, address, client)
        if not self.registry.admit(connection):
            self.registry.on_refused(address, TOO_MANY_CONNECTIONS.status)
            connection.connection_lost(None)
            with client, contextlib.suppress(OSError):
                if self.context is None:
                    client.send(TOO_MANY_CONNECTIONS.to_bytes(self.registry.retry_after_s()))
                    client.recv(2**16)  # to close a socket with unread bytes would reset it
            return
        if self.context is None:
            self._establish(connection, client)
            return
        if not self._waiting:
            self._loop.call_soon(self._begin_handshakes)
        self._waiting.setdefault(address, deque()).append((connection, client))

    def _begin_handshakes(self) -> None:
        num_begun = 0
        while self._waiting and num_begun < HANDSHAKES_AT_ONCE:
            address = next(iter(self._waiting))
            queue = self._waiting.pop(address)
            connection, client = queue.popleft()
            if queue:
                self._waiting[address] = queue  # last in the order of addresses
            if connection.is_closing() or client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
                _drop(connection, client)
                continue
            num_begun += 1
            self._establish(connection, client)
        if self._waiting:
            self._loop.call_soon(self._begin_handshakes)

    def _establish(self, connection: Connection, client: socket.socket) -> None:
        if self.context is None:
            connecting: Any = self._loop.connect_accepted_socket(lambda: connection, client)
        else:
            tls = connection.tls = TlsRecords(connection, self.context, self.limits.header_timeout_s)
            connecting = self._complete_handshake(tls, client)
        handshake = self._loop.create_task(connecting)
        connection.handshake = handshake
        self._handshakes.add(handshake)

        def on_done(task: asyncio.Task[Any]) -> None:
            self._handshakes.discard(task)
            connection.handshake = None
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                _drop(connection, client)
            if not isinstance(error, OSError | None):
                logger.error("the connection of a client could not be set up", exc_info=error)

        handshake.add_done_callback(on_done)

    async def _complete_handshake(self, tls: TlsRecords, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: tls, client)
            await tls.handshake
        except BaseException:
            tls.abort()
            raise
        finally:
            del tls.handshake  # a failed handshake's traceback refers to this frame: break the cycle


def _drop(connection: Connection, client: socket.socket) -> None:
    connection.connection_lost(None)
    client.close()


def network_of(host: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address, which belongs to one customer."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
