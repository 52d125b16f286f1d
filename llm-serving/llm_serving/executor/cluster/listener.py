"""Where WorkAgents of other machines come in.

Who is at the cluster's port and has not shown yet which start he belongs to: so many at once.

Which start a connection belongs to: the one whose token it shows, and once.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from llm_serving.errors import LLMServingError
from llm_serving.executor.worker_process import AgentChannel
from llm_serving.log import get_logger
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel, notice_silence
from llm_serving.transport.messages import AgentMessage, Arrived
from llm_serving.transport.tls_identity import ClusterIdentity


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


class Arrivals:
    """The starts that wait for their WorkAgent; from any thread.

    A token is of one start. Whoever shows that of an earlier one, or shows one again, comes too late: he is given to
    nobody, and what he says is read by nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, SimpleQueue[AgentChannel]] = {}

    @contextmanager
    def expecting(self, token: str) -> Iterator[Arrival]:
        """A connection that shows the token belongs to whoever is inside; one only, a second finds nobody."""
        queue: SimpleQueue[AgentChannel] = SimpleQueue()
        with self._lock:
            self._expected[token] = queue
        try:
            yield Arrival(queue)
        finally:
            with self._lock:
                self._expected.pop(token, None)
            with contextlib.suppress(Empty):  # it came when nobody waited any more
                queue.get_nowait().close()

    def come(self, token: str, channel: AgentChannel) -> bool:
        """Gives a connection to the start of the token; False: nobody expects it (any more)."""
        with self._lock:
            queue = self._expected.pop(token, None)
            if queue is not None:
                queue.put(channel)
        return queue is not None


class Arrival:
    """Of one WorkAgent."""

    def __init__(self, queue: SimpleQueue[AgentChannel]) -> None:
        self._queue = queue

    def wait(self, timeout_s: float) -> AgentChannel | None:
        """The channel to it; None: it has not come in this time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None


logger = get_logger(__name__)

HANDSHAKE_S: Final = 10.0
ARRIVAL_BYTES: Final = 256
"""Of the frame that shows the token: nobody who is not expected has more memory taken for him."""
AGAIN_S: Final = 0.2
"""Between two attempts where nobody can be taken."""
MAX_HANDSHAKES: Final = 64
"""At once; beyond that, one who has not shown the secret gives way, or whoever comes is turned away."""


class Listener:
    """Takes connections of who has the cluster's secret, and gives each to the start that it names.

    Whoever connects has `HANDSHAKE_S` to show the secret and the token, in a thread of his own: who is silent delays
    nobody, and keeps nobody's place.

    Args:
        host: Address of this machine that the others reach.
        identity: Of the cluster.
    """

    def __init__(self, host: str, identity: ClusterIdentity) -> None:
        """Raises OSError: the address cannot be listened at."""
        self._context = identity.of_master()
        self._arrivals = Arrivals()
        self._handshakes = Handshakes(MAX_HANDSHAKES)
        self._closing = threading.Event()
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="cluster-listener", daemon=True)
        self._thread.start()

    def expecting(self, token: str) -> AbstractContextManager[Arrival]:
        """As of `Arrivals`."""
        return self._arrivals.expecting(token)

    def close(self) -> None:
        """Takes no more; connections that were given away stay."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join()

    def _listen(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:  # of the one that comes, or nothing is left to take it with
                if self._closing.is_set():
                    return
                if not isinstance(error, ConnectionError):
                    self._closing.wait(AGAIN_S)
                continue
            try:
                self._invite(connection, peer[0])
            except (OSError, RuntimeError):  # it is gone again, or no thread can be had now
                connection.close()

    def _invite(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(HANDSHAKE_S)
        secured = self._context.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )  # takes it over
        thread = threading.Thread(target=self._welcome, args=(secured, peer), daemon=True)
        if not self._handshakes.begin(secured, peer, thread):
            secured.close()
            return
        try:
            thread.start()
        except RuntimeError:
            self._handshakes.end(secured)
            secured.close()
            raise

    def _welcome(self, connection: ssl.SSLSocket, peer: str) -> None:
        taken, error = False, None
        try:
            connection.do_handshake()
            if self._handshakes.trust(connection):
                taken = self._show_in(connection, peer)
        except (OSError, LLMServingError) as caught:
            error = caught
        finally:
            stayed = self._handshakes.end(connection)
            if not taken:
                connection.close()
        if error is not None and stayed:
            logger.warning("a connection from %s to the cluster's port was refused: %s", peer, error)

    def _show_in(self, connection: ssl.SSLSocket, peer: str) -> bool:
        """Whether the connection belongs to a start that waits for it."""
        notice_silence(connection)
        channel: AgentChannel = Channel(connection, AgentMessage)  # type: ignore[arg-type]
        channel.max_frame_bytes = ARRIVAL_BYTES
        arrived = channel.receive(HANDSHAKE_S)
        channel.max_frame_bytes = MAX_FRAME_BYTES
        taken = isinstance(arrived, Arrived) and self._arrivals.come(arrived.token, channel)
        if not taken:
            logger.warning("a WorkAgent at %s came that nobody expects (any more)", peer)
        return taken
