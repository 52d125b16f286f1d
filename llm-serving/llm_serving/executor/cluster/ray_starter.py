"""WorkAgents as actors of Ray, which places them and says no more: our own frames tell who lives."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from llm_serving.core.process import command_of
from llm_serving.errors import ConfigError, TransportError, WorkerDiedError
from llm_serving.executor.cluster.ray_messages import (
    AgentEnded,
    Connected,
    KillAgent,
    Order,
    RayPlaces,
    Report,
    StartAgent,
)
from llm_serving.log import get_logger
from llm_serving.transport.channel import Channel

logger = get_logger(__name__)

PATIENCE_S: Final = 2.0
"""For an actor that was killed; one on a machine that is gone does not end before Ray says so."""
SHUTDOWN_S: Final = 10.0
"""For the connection to Ray, which does not end by itself where Ray's head is gone."""
ATTEMPTS: Final = 3
"""To start a Ray on this machine; each has processes of its own."""
COMMAND: Final = tuple(command_of("llm_serving.executor.cluster.ray_process"))


class RayStarter:
    """Places in a Ray cluster for all WorkAgents, through a process of its own: Ray ends whoever has lost its head for
    a minute. When that has happened, the next start opens another connection, to whatever cluster is there.

    Args:
        places: Wanted of the cluster. Its `address` is None where one is to be started on this machine, for as long as
            this lives.
        secret_file: With the cluster's secret, at the same path on every machine.
        command: Runs the process.
    """

    def __init__(self, places: RayPlaces, secret_file: str, command: Sequence[str] = COMMAND) -> None:
        """Raises ConfigError: Ray is not installed, there is no cluster at the address, or it has no room."""
        self._places, self._secret_file, self._command = places, secret_file, command
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        for num_left in reversed(range(ATTEMPTS)):
            self._connection = RayConnection(places, command)
            try:
                self.host = self._connection.wait().host
                break
            except BaseException as error:
                self.close()
                if not (num_left and self._connection.may_be_tried_again):
                    raise
                logger.warning("Ray is started again: %s", error)

    def start(self, index: int, ranks: Sequence[Sequence[str]]) -> RayAgent:
        with self._lock:
            if self._connection.is_gone:
                self._connection.close()
                logger.warning("the connection to Ray is lost; another one is opened")
                try:
                    self._connection = RayConnection(self._places, self._command)
                except OSError as error:
                    raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
            connection = self._connection
        given = tuple((*arguments, "--secret-file", self._secret_file) for arguments in ranks)
        return connection.start(next(self._numbers), index, given)

    def close(self) -> None:
        self._connection.close()


class RayConnection:
    """A process that is connected to Ray, or tries to."""

    def __init__(self, places: RayPlaces, command: Sequence[str]) -> None:
        """Raises OSError: it cannot be started."""
        ours, theirs = socket.socketpair()
        arguments = [msgspec.json.encode(places).decode(), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [*command, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._channel: Channel[Report] = Channel(ours, Report)  # type: ignore[arg-type]
        self._lock = threading.Lock()
        self._agents: dict[int, RayAgent] = {}
        self._answered = threading.Event()
        self._connected: Connected | None = None
        self._why_gone: str | None = None
        self.may_be_tried_again = False
        """Once it is gone: whether another one may do."""
        self._thread = threading.Thread(target=self._listen, name="ray", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # none can be had now
            self._process.kill()
            self._process.wait()
            self._channel.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def is_gone(self) -> bool:
        return self._why_gone is not None

    def wait(self) -> Connected:
        """Waits until there are places.

        Raises:
            ConfigError: There are none.
        """
        self._answered.wait()
        if self._connected is None:
            raise ConfigError(self._why_gone or "")
        return self._connected

    def start(self, number: int, index: int, ranks: tuple[tuple[str, ...], ...]) -> RayAgent:
        """Has a WorkAgent started once there are places."""
        agent = RayAgent(self, number)
        with self._lock:
            self._agents[number] = agent
        self.order(StartAgent(number, index, ranks))
        if self._why_gone is not None:  # it may have been lost before it was told
            agent.set_ended(self._why_gone)
        return agent

    def order(self, order: Order) -> None:
        with self._lock, contextlib.suppress(TransportError):
            self._channel.send(order)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.shutdown()
        try:
            self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._channel.close()

    def _listen(self) -> None:
        why = "the connection to Ray is lost"
        with contextlib.suppress(TransportError):
            while True:
                report = self._channel.receive()
                if isinstance(report, AgentEnded):
                    with self._lock:
                        agent = self._agents.pop(report.number, None)
                    if agent is not None:
                        agent.set_ended(report.how)
                elif isinstance(report, Connected):
                    self._connected = report
                    logger.info("Ray has places for all WorkAgents: %s", report.resources)
                    self._answered.set()
                else:
                    why, self.may_be_tried_again = report.error, report.again
        self._why_gone = why
        self._answered.set()
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            agent.set_ended(why)


class RayAgent:
    """A WorkAgent behind an actor, with all its ranks."""

    def __init__(self, connection: RayConnection, number: int) -> None:
        self._connection, self._number = connection, number
        self._ended = threading.Event()
        self._how = "unknown"

    @property
    def pid(self) -> int | None:
        return None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def described_end(self) -> str:
        return self._how

    def set_ended(self, how: str) -> None:
        """Is told by the connection."""
        if not self._ended.is_set():
            self._how = how
            self._ended.set()

    def kill(self) -> None:
        self._connection.order(KillAgent(self._number))

    def end(self, timeout_s: float | None) -> None:
        if not self._ended.wait(PATIENCE_S if timeout_s is None else timeout_s):
            self.kill()
