"""Starts WorkAgents as Ray actors through a process of its own (`ray_process`), and defines the messages to it."""

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
from llm_serving.log import get_logger
from llm_serving.transport.channel import Channel

KILL_TIMEOUT_S: Final = 2.0
"""Seconds to wait until a killed actor has exited. Ray may report the exit of a lost machine only later."""
SHUTDOWN_S: Final = 10.0
"""Seconds to wait until the Ray process has exited. It hangs if the head node is lost."""
ATTEMPTS: Final = 3


class RayWeights(msgspec.Struct, frozen=True):
    """A model folder of the master that Ray's object store copies to the folder `cache` of every machine."""

    folder: str
    cache: str


class RayRequirements(msgspec.Struct, frozen=True):
    address: str | None
    num_replicas: int
    cpus: int
    """Number of cores of a replica with all its ranks, which run on one machine."""
    strategy: str
    num_devices: int
    weights: RayWeights | None = None


class StartAgent(msgspec.Struct, tag="start", frozen=True):
    number: int
    index: int
    ranks: tuple[tuple[str, ...], ...]


class KillAgent(msgspec.Struct, tag="kill", frozen=True):
    number: int


class RayConnected(msgspec.Struct, tag="connected", frozen=True):
    host: str
    resources: str


class RayUnavailable(msgspec.Struct, tag="unusable", frozen=True):
    error: str
    is_retryable: bool = False


class AgentEnded(msgspec.Struct, tag="ended", frozen=True):
    number: int
    exit_description: str


RayCommand = StartAgent | KillAgent
RayReport = RayConnected | RayUnavailable | AgentEnded


logger = get_logger(__name__)

COMMAND: Final = tuple(command_of("llm_serving.executor.cluster.ray_process"))


class RayStarter:
    """Starts WorkAgents through a Ray process. If that process has exited, the next start creates a new one."""

    def __init__(self, requirements: RayRequirements, secret_file: str, command: Sequence[str] = COMMAND) -> None:
        self._requirements, self._secret_file, self._command = requirements, secret_file, command
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        for num_left in reversed(range(ATTEMPTS)):
            self._connection = RayConnection(requirements, command)
            try:
                self.host = self._connection.wait().host
                break
            except BaseException as error:
                self.close()
                if not (num_left and self._connection.is_retryable):
                    raise
                logger.warning("Ray failed to start; retrying: %s", error)

    def start(self, index: int, ranks: Sequence[Sequence[str]]) -> RayAgent:
        """Run `python -m llm_serving.work_agent` on one machine, once with each list of arguments in `ranks`. Raise
        WorkerDiedError if that fails.
        """
        with self._lock:
            if self._connection.is_gone:
                self._connection.close()
                logger.warning("the connection to Ray was lost; reconnecting")
                try:
                    self._connection = RayConnection(self._requirements, self._command)
                except OSError as error:
                    raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
            connection = self._connection
        commands = tuple((*arguments, "--secret-file", self._secret_file) for arguments in ranks)
        return connection.start(next(self._numbers), index, commands)

    def close(self) -> None:
        self._connection.close()


class RayConnection:
    def __init__(self, requirements: RayRequirements, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        arguments = [msgspec.json.encode(requirements).decode(), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603
                [*command, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._channel: Channel[RayReport] = Channel(ours, RayReport)  # type: ignore[arg-type]
        self._lock = threading.Lock()
        self._agents: dict[int, RayAgent] = {}
        self._answered = threading.Event()
        self._connected: RayConnected | None = None
        self._gone_reason: str | None = None
        self.is_retryable = False
        self._thread = threading.Thread(target=self._listen, name="ray", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread can be created
            self._process.kill()
            self._process.wait()
            self._channel.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    @property
    def is_gone(self) -> bool:
        return self._gone_reason is not None

    def wait(self) -> RayConnected:
        self._answered.wait()
        if self._connected is None:
            raise ConfigError(self._gone_reason or "")
        return self._connected

    def start(self, number: int, index: int, ranks: tuple[tuple[str, ...], ...]) -> RayAgent:
        agent = RayAgent(self, number)
        with self._lock:
            self._agents[number] = agent
        self.send(StartAgent(number, index, ranks))
        if self._gone_reason is not None:  # the process may have exited before it got the command
            agent.set_exited(self._gone_reason)
        return agent

    def send(self, command: RayCommand) -> None:
        with self._lock, contextlib.suppress(TransportError):
            self._channel.send(command)

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
                        agent.set_exited(report.exit_description)
                elif isinstance(report, RayConnected):
                    self._connected = report
                    logger.info("Ray has reserved resources for all WorkAgents: %s", report.resources)
                    self._answered.set()
                else:
                    why, self.is_retryable = report.error, report.is_retryable
        self._gone_reason = why
        self._answered.set()
        with self._lock:
            agents = list(self._agents.values())
        for agent in agents:
            agent.set_exited(why)


class RayAgent:
    def __init__(self, connection: RayConnection, number: int) -> None:
        self._connection, self._number = connection, number
        self._exited = threading.Event()
        self.exit_description = "unknown"
        self.pids: list[int] = []

    @property
    def has_exited(self) -> bool:
        return self._exited.is_set()

    def set_exited(self, description: str) -> None:
        if not self._exited.is_set():
            self.exit_description = description
            self._exited.set()

    def kill(self) -> None:
        self._connection.send(KillAgent(self._number))

    def wait_or_kill(self, timeout_s: float | None) -> None:
        if not self._exited.wait(KILL_TIMEOUT_S if timeout_s is None else timeout_s):
            self.kill()
