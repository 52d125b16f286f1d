"""Accept connections, as many as the limits allow, and make their TLS handshakes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from llm_serving.log import get_logger
from llm_serving.server.http.connection import Connection
from llm_serving.server.http.connection_limits import ConnectionLimits, address_of
from llm_serving.server.http.request_head import TOO_MANY_CONNECTIONS

logger = get_logger(__name__)

ACCEPTED_AT_ONCE: Final = 64
"""Connections that are accepted before the event loop does other work."""
EXHAUSTED_PAUSE_S: Final = 0.25
"""Time until the next try when the system has no file descriptor for a connection."""
TLS_SHUTDOWN_S: Final = 2.0
HANDSHAKES_AT_ONCE: Final = 2
"""TLS handshakes that begin in one iteration of the event loop; each costs a signature, about a millisecond."""
ESTABLISHED: Final = 1
"""State of a TCP connection, of Linux's `tcp_states.h`."""


class Acceptor:
    """Accepts connections, with TLS where there is a certificate; closing it is like closing one of asyncio's servers.

    A connection counts from before its TLS handshake. Handshakes begin a few at a time, one address after the other, so
    that hundreds of one client delay no other client. When the process has no file descriptor left, connections wait in
    the kernel.

    Args:
        listener: The caller closes it.
        registry: Says which connections there may be.
        new_connection: Makes the protocol of a connection from its address and socket.
        context: For TLS; None: plain HTTP.
        handshake_timeout_s: May be changed later.
    """

    def __init__(
        self,
        listener: socket.socket,
        registry: ConnectionLimits,
        new_connection: Callable[[str, socket.socket], Connection],
        context: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        self._listener = listener
        self._registry = registry
        self._new_connection = new_connection
        self._context = context
        self.handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[Any]] = set()
        self._waiting: dict[str, deque[tuple[Connection, socket.socket]]] = {}
        """Connections whose handshake has not begun, by address; the address that is next comes first."""
        self._pause: asyncio.TimerHandle | None = None
        self._is_exhausted = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no further connections and end handshakes; established connections stay."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        for queue in self._waiting.values():
            for connection, client in queue:
                _drop(connection, client)
        self._waiting.clear()

    async def wait_closed(self) -> None:
        """Wait until handshakes have ended."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client left before
                continue
            except OSError as error:  # to try again at once would keep a core busy
                if not self._is_exhausted:
                    logger.error("connections cannot be accepted: %s; they wait until they can", error.strerror)
                self._is_exhausted = True
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(
                    EXHAUSTED_PAUSE_S, self._loop.add_reader, self._listener, self._accept
                )
                return
            if self._is_exhausted:
                self._is_exhausted = False
                logger.warning("connections are accepted again")
            client.setblocking(False)
            self._admit(client, address_of(peer))

    def _admit(self, client: socket.socket, address: str) -> None:
        connection = self._new_connection(address, client)
        if not self._registry.admit(connection):
            self._registry.on_refused(address, TOO_MANY_CONNECTIONS.status)
            connection.connection_lost(None)
            with client, contextlib.suppress(OSError):
                if self._context is None:
                    client.send(TOO_MANY_CONNECTIONS.to_bytes(self._registry.retry_after_s()))
                    client.recv(2**16)  # to close a socket with unread bytes would reset it
            return
        if self._context is None:
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
                self._waiting[address] = queue  # behind the other addresses
            if connection.is_closing() or client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
                _drop(connection, client)
                continue
            num_begun += 1
            self._establish(connection, client)
        if self._waiting:
            self._loop.call_soon(self._begin_handshakes)

    def _establish(self, connection: Connection, client: socket.socket) -> None:
        timeouts: dict[str, Any] = {}
        if self._context is not None:
            timeouts = {"ssl_handshake_timeout": self.handshake_timeout_s, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
        handshake = self._loop.create_task(
            self._loop.connect_accepted_socket(lambda: connection, client, ssl=self._context, **timeouts)
        )
        connection.handshake = handshake
        self._handshakes.add(handshake)

        def on_done(task: asyncio.Task[Any]) -> None:
            self._handshakes.discard(task)
            connection.handshake = None
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                _drop(connection, client)
            if not isinstance(error, OSError | None):
                logger.error("a connection failed", exc_info=error)

        handshake.add_done_callback(on_done)


def _drop(connection: Connection, client: socket.socket) -> None:
    """End a connection that was not established."""
    connection.connection_lost(None)
    client.close()
