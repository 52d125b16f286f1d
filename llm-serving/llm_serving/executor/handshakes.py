"""Who is at the cluster's port and has not shown yet which start he belongs to: so many at once."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from dataclasses import dataclass


@dataclass
class _Guest:
    peer: str
    thread: threading.Thread
    has_secret: bool = False


class Handshakes:
    """Where there is no place, one who has not shown the secret gives way to who comes.

    That is the oldest of those at the address that has the most of them. So whoever is silent keeps nobody out, and
    strangers who come again and again are in the way of each other before they are in that of other machines.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._guests: dict[ssl.SSLSocket, _Guest] = {}
        """The oldest first."""

    def begin(self, connection: ssl.SSLSocket, peer: str, thread: threading.Thread) -> bool:
        """Whether there is a place for it. The thread, which is started next, has to `end` it before it closes it."""
        with self._lock:
            leaving = None if len(self._guests) < self._most else self._who_gives_way()
            if leaving is not None:
                before = self._guests.pop(leaving)
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(leaving, socket.SHUT_RDWR)  # its thread is told
            elif len(self._guests) >= self._most:
                return False
            self._guests[connection] = _Guest(peer, thread)
        if leaving is not None:
            before.thread.join()
        return True

    def trust(self, connection: ssl.SSLSocket) -> bool:
        """It has shown the secret, and gives way to nobody from now on; False: it has done so already."""
        with self._lock:
            if (guest := self._guests.get(connection)) is None:
                return False
            guest.has_secret = True
            return True

    def end(self, connection: ssl.SSLSocket) -> bool:
        """Gives its place back; False: somebody else had it already."""
        with self._lock:
            return self._guests.pop(connection, None) is not None

    def _who_gives_way(self) -> ssl.SSLSocket | None:
        strangers = {connection: guest.peer for connection, guest in self._guests.items() if not guest.has_secret}
        counts = Counter(strangers.values())
        return max(strangers, key=lambda each: counts[strangers[each]], default=None)  # of equals the oldest
