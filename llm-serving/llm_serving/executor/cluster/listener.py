"""The master's port for WorkAgents on other machines. A connection presents a token that identifies the WorkAgent."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import Empty, SimpleQueue
from typing import Final

from llm_serving.errors import LLMServingError
from llm_serving.executor.worker_process import AgentChannel
from llm_serving.log import get_logger
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel, enable_keepalive
from llm_serving.transport.messages import AgentMessage, Attach
from llm_serving.transport.tls_identity import ClusterIdentity

logger = get_logger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 10.0
MAX_ATTACH_BYTES: Final = 256
"""Maximum bytes of the first frame, so that an unknown client cannot make the master allocate memory."""
ACCEPT_RETRY_S: Final = 0.2
MAX_HANDSHAKES: Final = 64


class PendingHandshakes:
    """Connections whose clients have not proved yet that they know the cluster's secret. Thread-safe.

    If there are too many, a new connection replaces the oldest one of the address with the most connections. So silent
    connections cannot keep other clients out.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._connections: dict[ssl.SSLSocket, tuple[str, threading.Thread]] = {}

    def add(self, connection: ssl.SSLSocket, peer: str, thread: threading.Thread) -> None:
        """Add a connection. After the handshake and before closing it, `thread` must call `remove`."""
        with self._lock:
            dropped = self._drop_one() if len(self._connections) >= self._limit else None
            self._connections[connection] = peer, thread
        if dropped is not None:
            dropped.join()

    def remove(self, connection: ssl.SSLSocket) -> bool:
        """Remove a connection. Return False if a new connection has replaced it."""
        with self._lock:
            return self._connections.pop(connection, None) is not None

    def _drop_one(self) -> threading.Thread:
        counts = Counter(peer for peer, _ in self._connections.values())
        dropped = max(self._connections, key=lambda each: counts[self._connections[each][0]])  # if equal, the oldest
        _, thread = self._connections.pop(dropped)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(dropped, socket.SHUT_RDWR)  # ends the handshake in its thread
        return thread


class PendingStarts:
    """Started WorkAgents that have not connected yet, by token. A token is valid for one connection. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, SimpleQueue[AgentChannel]] = {}

    @contextmanager
    def expect(self, token: str) -> Iterator[SimpleQueue[AgentChannel]]:
        """Return a context with a queue, which gets the connection that presents `token`."""
        queue: SimpleQueue[AgentChannel] = SimpleQueue()
        with self._lock:
            self._expected[token] = queue
        try:
            yield queue
        finally:
            with self._lock:
                self._expected.pop(token, None)
            with contextlib.suppress(Empty):  # the WorkAgent connected after the caller stopped waiting
                queue.get_nowait().close()

    def deliver(self, token: str, channel: AgentChannel) -> bool:
        with self._lock:
            queue = self._expected.pop(token, None)
            if queue is not None:
                queue.put(channel)
        return queue is not None


class Listener:
    """Accepts connections of WorkAgents that present the token of their start. Raise OSError for a bad address."""

    def __init__(self, host: str, identity: ClusterIdentity) -> None:
        self._context = identity.server_context()
        self._pending_starts = PendingStarts()
        self._handshakes = PendingHandshakes(MAX_HANDSHAKES)
        self._closing = threading.Event()
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._listen, name="cluster-listener", daemon=True)
        self._thread.start()

    def expect(self, token: str) -> AbstractContextManager[SimpleQueue[AgentChannel]]:
        return self._pending_starts.expect(token)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        self._thread.join()

    def _listen(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError as error:  # the connection was reset, or descriptors or memory are exhausted
                if self._closing.is_set():
                    return
                if not isinstance(error, ConnectionError):
                    self._closing.wait(ACCEPT_RETRY_S)
                continue
            try:
                self._start_handshake(connection, peer[0])
            except (OSError, RuntimeError):  # the connection was reset, or no thread could be started
                connection.close()

    def _start_handshake(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        # Takes ownership of the socket.
        secured = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=self._handshake, args=(secured, peer), daemon=True)
        self._handshakes.add(secured, peer, thread)
        try:
            thread.start()
        except RuntimeError:
            self._handshakes.remove(secured)
            secured.close()
            raise

    def _handshake(self, connection: ssl.SSLSocket, peer: str) -> None:
        is_authenticated, attached, error = False, False, None
        try:
            connection.do_handshake()
            is_authenticated = self._handshakes.remove(connection)
            attached = is_authenticated and self._attach(connection, peer)
        except (OSError, LLMServingError) as caught:
            error = caught
        finally:
            was_dropped = not (is_authenticated or self._handshakes.remove(connection))
            if not attached:
                connection.close()
        if error is not None and not was_dropped:
            logger.warning("refused a connection from %s to the cluster's port: %s", peer, error)

    def _attach(self, connection: ssl.SSLSocket, peer: str) -> bool:
        enable_keepalive(connection)
        channel: AgentChannel = Channel(connection, AgentMessage)  # type: ignore[arg-type]
        channel.max_frame_bytes = MAX_ATTACH_BYTES
        message = channel.receive(HANDSHAKE_TIMEOUT_S)
        channel.max_frame_bytes = MAX_FRAME_BYTES
        attached = isinstance(message, Attach) and self._pending_starts.deliver(message.token, channel)
        if not attached:
            logger.warning(
                "closed a connection from %s to the cluster's port: no WorkAgent that is being started has its token",
                peer,
            )
        return attached
