"""Taking connections from the listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from llm_serving.core.timings import monotonic
from llm_serving.log import get_logger
from llm_serving.server.front_door.certificates import Certificates
from llm_serving.server.front_door.connection import Connection
from llm_serving.server.front_door.deciphering import READ_BYTES, Deciphering
from llm_serving.server.front_door.guests import Guests, address_of
from llm_serving.server.front_door.reader import Reader
from llm_serving.server.front_door.refusals import NO_PLACE
from llm_serving.server.front_door.turns import Turns
from llm_serving.server.front_door.waiting_row import WaitingRow

logger = get_logger(__name__)

ACCEPTED_AT_ONCE: Final = 256
"""Connections taken from the kernel before others get their turn on the event loop: some 3 ms. In the kernel all wait
in one row, and a probe behind five hundred waits for as many turns as these take."""
MAX_WAITING: Final = 1024
"""Connections that are taken and wait for their turn to be welcomed. In the kernel they would wait behind each other;
here each address has its turn. Beyond, the address that has most loses its newest."""
WELCOME_WEIGHT: Final = 5.0
"""What a connection costs the event loop until it has ended, in times of what it costs here, as measured."""
PAUSE_S: Final = 0.25
"""Seconds until the next try when the system has no file descriptor or memory for a connection."""
HANDSHAKE_S: Final = 0.001
"""Seconds of the event loop that a handshake is reckoned with: a signature, and objects for the connection."""
UNREAD_BYTES: Final = 16 * 1024
"""Bytes that are read of whoever is turned away: those unread at its end would make the system reset the connection,
and the client might never see why."""
ESTABLISHED: Final = 1
"""Of Linux's `tcp_states.h`."""
TLS_SHUTDOWN_S: Final = 2.0
"""Seconds a client gets to take leave of TLS."""


class _Taken(NamedTuple):
    """From the kernel."""

    client: socket.socket
    since: float


class Acceptor:
    """Welcomes connections, as many as there is room for; the others are told so.

    A connection counts from before its handshake. Handshakes begin when their first bytes have come, as many in a turn
    of the event loop as there is time for; whoever has left by then has none, and takes no time from the others.

    When the process has no file descriptor left, connections wait in the kernel until there is one.

    Args:
        listener: Listening socket; the caller closes it.
        guests: Counts the connections.
        new_connection: Makes the protocol of a connection from its address.
        certificates: For TLS; None: plain HTTP.
        handshake_timeout_s: Seconds for a TLS handshake; may be changed later.
        turns: In which connections are welcomed.
        max_waiting: For their turn.
    """

    def __init__(
        self,
        listener: socket.socket,
        guests: Guests,
        new_connection: Callable[[str], Connection],
        certificates: Certificates | None,
        handshake_timeout_s: float,
        turns: Turns,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._listener = listener
        self._guests = guests
        self._new_connection = new_connection
        self._certificates = certificates
        self.handshake_timeout_s = handshake_timeout_s
        self._turns = turns
        self._waiting = WaitingRow[_Taken](max_waiting)
        """Each address that is there waits for one turn, however many it has."""
        self._loop = asyncio.get_running_loop()
        self._welcomes: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._exhausted = False
        self._closed = False
        if certificates is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, READ_BYTES)  # connections inherit it
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Takes no further connections and breaks off handshakes; connections that are made go on."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for taken in self._waiting.take_all():
            taken.client.close()
        for welcome in self._welcomes:
            welcome.cancel()

    async def wait_closed(self) -> None:
        """Waits until handshakes have been broken off."""
        await asyncio.gather(*self._welcomes, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it left before it was taken
                continue
            except OSError as error:
                self._wait(error)
                return
            if self._exhausted:
                self._exhausted = False
                logger.warning("connections are accepted again")
            self._queue(client, address_of(peer))

    def _wait(self, error: OSError) -> None:
        """Leaves connections in the kernel for a while: asking again at once would keep a core busy."""
        if not self._exhausted:
            self._exhausted = True
            logger.error("connections cannot be accepted: %s; they wait until they can", error.strerror)
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _queue(self, client: socket.socket, address: str) -> None:
        client.setblocking(False)
        has_turn = address in self._waiting
        lost = self._waiting.add(address, _Taken(client, monotonic()))
        if lost is not None:
            self._turn_away(lost[1].client, lost[0])
        if address in self._waiting and not has_turn:
            self._turns.do(address, partial(self._receive, address))

    def _turn_away(self, client: socket.socket, address: str) -> None:
        self._guests.on_refused(address, NO_PLACE.status)
        with client, contextlib.suppress(OSError):
            if self._certificates is None:
                client.send(NO_PLACE.to_bytes(self._guests.seconds_to_comeback(address)))
                client.recv(UNREAD_BYTES)

    def _receive(self, address: str) -> None:
        if address not in self._waiting:  # there is an end of all
            return
        client, since = self._waiting.take(address)
        if address in self._waiting:
            self._turns.do_later(address, partial(self._receive, address))
        has_sent = _has_sent(client)
        if has_sent is False or (has_sent and self._certificates is not None and _has_ended(client)):
            client.close()
            return
        connection = self._new_connection(address)
        connection.descriptor = client.fileno()
        if has_sent and self._certificates is None:
            connection.unread_since = since
        if not self._guests.admit(connection):
            connection.abandon()
            self._turn_away(client, address)
            return
        self._turns.weigh(WELCOME_WEIGHT)
        if has_sent and self._certificates is not None:
            self._turns.charge(HANDSHAKE_S)
        welcome = self._loop.create_task(self._welcome(client, connection, may_begin=bool(has_sent)))
        connection.welcome = welcome
        self._welcomes.add(welcome)

        def end(task: asyncio.Task[None]) -> None:
            self._welcomes.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is None and not task.cancelled():
                return
            self._guests.leave(connection)
            connection.abandon()
            client.close()
            if not isinstance(error, OSError | None):  # what a client does wrong in a handshake is nothing to log
                logger.error("a connection failed", exc_info=error)

        welcome.add_done_callback(end)  # a task that is cancelled early never runs: it cannot clean up itself

    async def _welcome(self, client: socket.socket, connection: Connection, *, may_begin: bool) -> None:
        """With `may_begin` its first bytes have come, and its handshake is part of the turn it had."""
        if self._certificates is None:
            reader = Reader(connection)
            await self._loop.connect_accepted_socket(lambda: reader, client)
            return
        async with asyncio.timeout(self.handshake_timeout_s):
            if not may_begin:
                await self._hear(client)
                await self._turns.spend(connection.address, HANDSHAKE_S)
                if _has_ended(client):
                    raise ConnectionAbortedError
            handshake = self._loop.create_future()
            times = self.handshake_timeout_s, TLS_SHUTDOWN_S
            tls = Deciphering(self._loop, connection, self._certificates.context, handshake, *times, self._turns)
            try:
                await self._loop.connect_accepted_socket(lambda: tls, client)
                await handshake
            except BaseException:
                tls.abandon()
                raise
            finally:
                del handshake  # its error refers to this frame

    async def _hear(self, client: socket.socket) -> None:
        """Returns when the client has sent something, or has left."""
        heard = self._loop.create_future()

        def on_bytes() -> None:
            if not heard.done():
                heard.set_result(None)

        self._loop.add_reader(client, on_bytes)
        try:
            await heard
        finally:
            self._loop.remove_reader(client)


def _has_sent(client: socket.socket) -> bool | None:
    """Whether it has sent something; False: it ended before it did, and welcoming it would cost twenty times as much;
    None: it may still do."""
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return False


def _has_ended(client: socket.socket) -> bool:
    """Whether it will send no more, whatever it has sent: its handshake cannot come to its end."""
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
    except OSError:
        return True
