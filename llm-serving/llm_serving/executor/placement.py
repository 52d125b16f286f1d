"""Where WorkAgents run: as processes of this machine, or on machines of a cluster."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from typing import Any, NamedTuple, Protocol

from llm_serving.errors import WorkerDiedError
from llm_serving.executor.agent_process import AgentChannel, AgentLink, AgentProcess, LocalProcess
from llm_serving.executor.given_up import GivenUp
from llm_serving.executor.ranks import RankChannels, RankProcesses
from llm_serving.transport.channel import Channel
from llm_serving.transport.inline_arrays import InlineArrays
from llm_serving.transport.messages import AgentMessage, LoadModel
from llm_serving.transport.rank_memory import rank_memory
from llm_serving.transport.shared_arrays import SharedBuffers


class Started(NamedTuple):
    """A WorkAgent that has been connected to, and nothing else yet."""

    process: AgentProcess
    channel: AgentLink
    buffers: SharedBuffers | InlineArrays
    machine: str = ""
    """Its address; empty: the master's own."""
    blocks: AgentChannel | None = None
    """By which blocks are handed over; None: through memory, or not at all."""


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


class ThisMachine:
    """WorkAgents are children of this process.

    Each has three ties to it, all inherited and none with a name that others could find: one end of a pair of sockets
    (steps), a memory file (their arrays) and its standard input, a pipe whose end tells it that the master is gone,
    however the master ended. All of them have the transfer memory, if there is one.
    """

    def __init__(self, transfer_fd: int | None = None) -> None:
        """`transfer_fd`: of memory by which they hand blocks over; it stays the caller's."""
        self._transfer_fd = transfer_fd

    def start(
        self, index: int, settings: LoadModel, log_level: str, timeout_s: float | None, given_up: GivenUp | None
    ) -> Started:
        with contextlib.ExitStack() as undo:
            try:
                buffers = SharedBuffers.create(settings.num_buffers, settings.buffer_bytes)
                process: AgentProcess
                link: AgentLink
                undo.callback(buffers.close)
                if settings.num_ranks == 1:
                    process, link = _start(undo, index, settings, buffers.fd, log_level, 0, None, self._transfer_fd)
                else:
                    process, link = _start_ranks(undo, index, settings, buffers.fd, log_level)
            except OSError as error:
                raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
            undo.pop_all()
        return Started(process, link, buffers)

    def settings(self, settings: LoadModel) -> LoadModel:
        return settings

    def close(self) -> None:
        pass


def _start(
    undo: contextlib.ExitStack, index: int, settings: LoadModel, *others: Any
) -> tuple[LocalProcess, AgentChannel]:
    ours, theirs = socket.socketpair()
    channel: AgentChannel = Channel(ours, AgentMessage)  # type: ignore[arg-type]
    channel.send_timeout_s = settings.step_timeout_s
    undo.callback(channel.close)
    with theirs:
        process = _spawn(index, theirs.fileno(), *others)
    undo.callback(process.end, 0.0)
    return process, channel


def _start_ranks(
    undo: contextlib.ExitStack, index: int, settings: LoadModel, memory_fd: int, log_level: str
) -> tuple[RankProcesses, RankChannels]:
    """All of one replica: they read the same steps, and add up what they compute in memory of their own."""
    ranks = range(settings.num_ranks)
    with rank_memory(settings.num_ranks) as ranks_fd:
        started = [_start(undo, index, settings, memory_fd, log_level, rank, ranks_fd) for rank in ranks]
    return RankProcesses([process for process, _ in started]), RankChannels([channel for _, channel in started])


def _spawn(
    index: int,
    socket_fd: int,
    memory_fd: int,
    log_level: str,
    rank: int = 0,
    ranks_fd: int | None = None,
    transfer_fd: int | None = None,
) -> LocalProcess:
    command = [sys.executable, "-m", "llm_serving.work_agent", "--index", str(index), "--log-level", log_level]
    command += ["--socket-fd", str(socket_fd), "--memory-fd", str(memory_fd)]
    inherited = [socket_fd, memory_fd]
    if ranks_fd is not None:
        command += ["--rank", str(rank), "--ranks-fd", str(ranks_fd)]
        inherited.append(ranks_fd)
    if transfer_fd is not None:
        command += ["--transfer-fd", str(transfer_fd)]
        inherited.append(transfer_fd)
    # A session of its own: Ctrl-C reaches the whole group of the master, who decides when its WorkAgents end.
    return LocalProcess(command, stdin=subprocess.PIPE, pass_fds=inherited, start_new_session=True)
