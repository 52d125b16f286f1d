"""Where WorkAgents run: as processes of this machine, or on machines of a cluster.

Starts what computes a replica: the process of a WorkAgent, or all its ranks.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from llm_serving.core.process import command_of
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.restart_status import GivenUp
from llm_serving.executor.tensor_parallel import RankProcesses, one_link
from llm_serving.executor.worker_process import AgentChannel, AgentLink, AgentProcess, LocalProcess
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import AgentMessage, LoadModel
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, rank_memory


class Given(NamedTuple):
    """What a process is started with."""

    arguments: Sequence[str]
    inherited: Sequence[int] = ()
    """Descriptors."""


def start_processes(
    each: Sequence[Given], environment: Mapping[str, str] | None = None
) -> LocalProcess | RankProcesses:
    """Those of one replica, one for each rank. Several get memory to add up in and a port of this machine by which they
    find each other if they compute graphs: if another process takes it before they do, they end, and are started again
    with another.

    Raises:
        OSError: Not all can be started; those that were have ended.
    """
    if len(each) == 1:
        return _spawn(each[0], environment)
    with rank_memory(len(each)) as fd, contextlib.ExitStack() as undo:
        port, ranks = str(_free_port()), list[LocalProcess]()
        for rank, given in enumerate(each):
            arguments = [*given.arguments, "--rank", str(rank), "--ranks-fd", str(fd), "--group-port", port]
            ranks.append(_spawn(Given(arguments, [*given.inherited, fd]), environment))
            undo.callback(ranks[-1].end, 0.0)
        undo.pop_all()
    return RankProcesses(ranks)


def _spawn(given: Given, environment: Mapping[str, str] | None) -> LocalProcess:
    command = command_of("llm_serving.work_agent", *given.arguments)
    # A session of its own: Ctrl-C reaches the whole group of who starts it, who decides when WorkAgents end.
    return LocalProcess(
        command, stdin=subprocess.PIPE, pass_fds=given.inherited, env=environment, start_new_session=True
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]  # type: ignore[no-any-return]


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

    Each, and each of several ranks, has three ties to it, all inherited and none with a name that others could find:
    one end of a pair of sockets (steps), a memory file (their arrays) and its standard input, a pipe whose end tells it
    that the master is gone, however the master ended. All of them have the transfer memory, if there is one.
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
                undo.callback(buffers.close)
                process, link = self._start(undo, index, settings, buffers.fd, log_level)
            except OSError as error:
                raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
            undo.pop_all()
        return Started(process, link, buffers)

    def settings(self, settings: LoadModel) -> LoadModel:
        return settings

    def close(self) -> None:
        pass

    def _start(
        self, undo: contextlib.ExitStack, index: int, settings: LoadModel, memory_fd: int, log_level: str
    ) -> tuple[AgentProcess, AgentLink]:
        arguments = ["--index", str(index), "--log-level", log_level, "--memory-fd", str(memory_fd)]
        inherited = [memory_fd]
        if self._transfer_fd is not None:
            arguments += ["--transfer-fd", str(self._transfer_fd)]
            inherited.append(self._transfer_fd)
        channels, given = list[AgentChannel](), list[Given]()
        with contextlib.ExitStack() as handed_over:
            for _ in range(settings.num_ranks):
                ours, theirs = socket.socketpair()
                handed_over.enter_context(theirs)
                channels.append(Channel(ours, AgentMessage))  # type: ignore[arg-type]
                channels[-1].send_timeout_s = settings.step_timeout_s
                undo.callback(channels[-1].close)
                given.append(Given([*arguments, "--socket-fd", str(theirs.fileno())], [*inherited, theirs.fileno()]))
            process = start_processes(given)
        undo.callback(process.end, 0.0)
        return process, one_link(channels)
