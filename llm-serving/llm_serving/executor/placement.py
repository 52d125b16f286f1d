"""Where WorkAgents run: as processes of this machine, or on machines of a cluster."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import NamedTuple, Protocol

from llm_serving.core.agent_exit import described_exit
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.given_up import GivenUp
from llm_serving.transport.channel import Channel
from llm_serving.transport.inline_arrays import InlineArrays
from llm_serving.transport.messages import AgentMessage, LoadModel
from llm_serving.transport.shared_arrays import SharedBuffers

AgentChannel = Channel[AgentMessage]


class AgentProcess(Protocol):
    """The process of a WorkAgent, as far as its supervisor has to do with it."""

    @property
    def pid(self) -> int | None:
        """None: it runs on another machine."""

    @property
    def has_ended(self) -> bool:
        """Whether it is known to be gone."""

    @property
    def described_end(self) -> str:
        """How it ended, as in "code 3"; only once it has."""

    def kill(self) -> None:
        """Ends it at once, whatever it does. It may have ended before."""

    def end(self, timeout_s: float | None) -> None:
        """Waits for its end, for this long at most, and then kills it."""


class Started(NamedTuple):
    """A WorkAgent that has been connected to, and nothing else yet."""

    process: AgentProcess
    channel: AgentChannel
    buffers: SharedBuffers | InlineArrays


class Placement(Protocol):
    def start(
        self, index: int, settings: LoadModel, log_level: str, timeout_s: float | None, given_up: GivenUp | None
    ) -> Started:
        """Starts WorkAgent `index`, within `timeout_s` seconds and unless it is `given_up` meanwhile.

        Raises:
            WorkerDiedError: It cannot be started, has ended again, does not come, or is not wanted any more.
        """

    def settings(self, settings: LoadModel) -> LoadModel:
        """What a WorkAgent is told, where it runs."""

    def close(self) -> None:
        """Gives up what was taken to start WorkAgents; those that were started have ended before."""


class LocalProcess(subprocess.Popen[bytes]):
    """A process of this machine, whose standard input is a pipe."""

    @property
    def has_ended(self) -> bool:
        return self.poll() is not None

    @property
    def described_end(self) -> str:
        return described_exit(self.returncode)

    def end(self, timeout_s: float | None) -> None:
        if self.stdin is not None:
            self.stdin.close()
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()


class ThisMachine:
    """WorkAgents are children of this process.

    Each has three ties to it, all inherited and none with a name that others could find: one end of a pair of sockets
    (steps), a memory file (their arrays) and its standard input, a pipe whose end tells it that the master is gone,
    however the master ended.
    """

    def start(
        self, index: int, settings: LoadModel, log_level: str, timeout_s: float | None, given_up: GivenUp | None
    ) -> Started:
        buffers = None
        ours = None
        try:
            buffers = SharedBuffers.create(settings.num_buffers, settings.buffer_bytes)
            ours, theirs = socket.socketpair()
            with theirs:
                process = _spawn(index, theirs.fileno(), buffers.fd, log_level)
        except OSError as error:
            for each in (buffers, ours):
                if each is not None:
                    each.close()
            raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
        return Started(process, Channel(ours, AgentMessage), buffers)  # type: ignore[arg-type]

    def settings(self, settings: LoadModel) -> LoadModel:
        return settings

    def close(self) -> None:
        pass


def _spawn(index: int, socket_fd: int, memory_fd: int, log_level: str) -> LocalProcess:
    command = [sys.executable, "-m", "llm_serving.work_agent", "--index", str(index), "--log-level", log_level]
    command += ["--socket-fd", str(socket_fd), "--memory-fd", str(memory_fd)]
    # A session of its own: Ctrl-C reaches the whole group of the master, who decides when its WorkAgents end.
    return LocalProcess(command, stdin=subprocess.PIPE, pass_fds=(socket_fd, memory_fd), start_new_session=True)
