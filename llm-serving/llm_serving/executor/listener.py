"""Where WorkAgents of other machines come in."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from contextlib import AbstractContextManager
from typing import Final

from llm_serving.errors import LLMServingError
from llm_serving.executor.agent_process import AgentChannel
from llm_serving.executor.arrivals import Arrival, Arrivals
from llm_serving.executor.handshakes import Handshakes
from llm_serving.log import get_logger
from llm_serving.transport.channel import MAX_FRAME_BYTES, Channel
from llm_serving.transport.cluster_identity import ClusterIdentity
from llm_serving.transport.connections import notice_silence
from llm_serving.transport.messages import AgentMessage, Arrived

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
