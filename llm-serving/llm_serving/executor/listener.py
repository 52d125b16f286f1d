"""Where WorkAgents of other machines come in."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final

from llm_serving.errors import LLMServingError
from llm_serving.executor.agent_process import AgentChannel
from llm_serving.log import get_logger
from llm_serving.transport.channel import Channel
from llm_serving.transport.cluster_identity import ClusterIdentity
from llm_serving.transport.connections import notice_silence
from llm_serving.transport.messages import AgentMessage, Arrived

logger = get_logger(__name__)

HANDSHAKE_S: Final = 10.0
MAX_HANDSHAKES: Final = 64
"""At once; whoever comes beyond is turned away, as it may well come again."""


class Listener:
    """Takes connections of who has the cluster's secret, and gives each to the start that it names.

    Whoever connects has `HANDSHAKE_S` to show the secret and the token, in a thread of his own: who is silent delays
    nobody.

    Args:
        host: Address of this machine that the others reach.
        identity: Of the cluster.
    """

    def __init__(self, host: str, identity: ClusterIdentity) -> None:
        """Raises OSError: the address cannot be listened at."""
        self._context = identity.of_master()
        self._expected: dict[str, SimpleQueue[AgentChannel]] = {}
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="cluster-listener", daemon=True)
        self._thread.start()

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

    def close(self) -> None:
        """Takes no more; connections that were given away stay."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join()

    def _listen(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except ConnectionError:  # gone before it was taken
                continue
            except OSError as error:
                if self._socket.fileno() < 0 or not _without_descriptors(error):
                    return
                threading.Event().wait(0.2)  # until there are descriptors again
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._welcome, args=(connection, peer[0]), daemon=True).start()
            else:
                connection.close()

    def _welcome(self, connection: socket.socket, peer: str) -> None:
        taken = False
        try:
            connection.settimeout(HANDSHAKE_S)
            secured = self._context.wrap_socket(connection, server_side=True)  # takes the connection with it
            connection = secured
            notice_silence(secured)
            channel: AgentChannel = Channel(secured, AgentMessage)  # type: ignore[arg-type]
            arrived = channel.receive(HANDSHAKE_S)
            with self._lock:
                queue = self._expected.pop(arrived.token, None) if isinstance(arrived, Arrived) else None
                if queue is not None:
                    queue.put(channel)
                    taken = True
            if not taken:
                logger.warning("a WorkAgent at %s came that nobody expects (any more)", peer)
        except (OSError, LLMServingError) as error:
            logger.warning("a connection from %s to the cluster's port was refused: %s", peer, error)
        finally:
            if not taken:
                connection.close()
            self._places.release()


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


def _without_descriptors(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
