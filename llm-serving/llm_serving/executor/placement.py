"""Placement of WorkAgents: where and how the processes of a replica are started."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from llm_serving.core.process import command_of
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.tensor_parallel import AgentLink, RankProcesses, join_channels
from llm_serving.executor.worker_process import AgentChannel, AgentProcess, LocalProcess, StartCancellation
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import AgentMessage, LoadModel
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, rank_memory


class ProcessArguments(NamedTuple):
    arguments: Sequence[str]
    inherited: Sequence[int] = ()


def start_processes(
    each: Sequence[ProcessArguments], environment: Mapping[str, str] | None = None
) -> LocalProcess | RankProcesses:
    """Start the processes of one replica, one for each rank. If one cannot start, kill the others and raise OSError.

    Several ranks inherit shared memory for all-reduce, and the number of a free port, which compiled graphs use for
    their collectives. If another process takes this port before the ranks do, they exit and restart with a new port.
    """
    if len(each) == 1:
        return _spawn(each[0], environment)
    with rank_memory(len(each)) as fd, contextlib.ExitStack() as undo:
        port, ranks = str(_free_port()), list[LocalProcess]()
        for rank, given in enumerate(each):
            arguments = [*given.arguments, "--rank", str(rank), "--ranks-fd", str(fd), "--group-port", port]
            ranks.append(_spawn(ProcessArguments(arguments, [*given.inherited, fd]), environment))
            undo.callback(ranks[-1].wait_or_kill, 0.0)
        undo.pop_all()
    return RankProcesses(ranks)


def _spawn(given: ProcessArguments, environment: Mapping[str, str] | None) -> LocalProcess:
    command = command_of("llm_serving.work_agent", *given.arguments)
    # A session of its own, because Ctrl-C reaches the whole process group and the master ends its WorkAgents itself.
    return LocalProcess(
        command, stdin=subprocess.PIPE, pass_fds=given.inherited, env=environment, start_new_session=True
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]  # type: ignore[no-any-return]


class StartedAgent(NamedTuple):
    """A connected WorkAgent that waits for the first message. `machine` is empty if it is the master's machine."""

    process: AgentProcess
    channel: AgentLink
    buffers: SharedBuffers | InlineArrays
    settings: LoadModel
    machine: str = ""
    blocks: AgentChannel | None = None


class Placement(Protocol):
    def start(
        self,
        index: int,
        settings: LoadModel,
        log_level: str,
        timeout_s: float | None,
        cancellation: StartCancellation,
    ) -> StartedAgent:
        """Start WorkAgent `index`, and return it with the settings for its machine. Raise WorkerDiedError if it exits,
        is cancelled, or does not connect in time.
        """


class LocalPlacement:
    """Starts WorkAgents as child processes of the master.

    Each rank's process inherits a socket for messages, a memory file for step arrays, memory for KV blocks that other
    replicas fetch (`transfer_fd`), and a pipe as standard input, which closes when the master exits for any reason.
    """

    def __init__(self, transfer_fd: int | None = None) -> None:
        self._transfer_fd = transfer_fd

    def start(
        self,
        index: int,
        settings: LoadModel,
        log_level: str,
        timeout_s: float | None,
        cancellation: StartCancellation,
    ) -> StartedAgent:
        with contextlib.ExitStack() as undo:
            try:
                buffers = SharedBuffers.create(settings.num_buffers, settings.buffer_bytes)
                undo.callback(buffers.close)
                process, link, blocks = self._start(undo, index, settings, buffers.fd, log_level)
            except OSError as error:
                raise WorkerDiedError(f"WorkAgent {index} cannot be started: {error.strerror or error}") from error
            undo.pop_all()
        return StartedAgent(process, link, buffers, settings, blocks=blocks)

    def _start(
        self, undo: contextlib.ExitStack, index: int, settings: LoadModel, memory_fd: int, log_level: str
    ) -> tuple[AgentProcess, AgentLink, AgentChannel | None]:
        arguments = ["--index", str(index), "--log-level", log_level, "--memory-fd", str(memory_fd)]
        inherited = [memory_fd]
        if self._transfer_fd is not None:
            arguments += ["--transfer-fd", str(self._transfer_fd)]
            inherited.append(self._transfer_fd)
        channels, given, blocks = list[AgentChannel](), list[ProcessArguments](), None
        with contextlib.ExitStack() as handed_over:
            if settings.pa.disk_cache_path is not None:
                ours, theirs = socket.socketpair()
                handed_over.enter_context(theirs)
                blocks = Channel[AgentMessage](ours, AgentMessage)  # type: ignore[arg-type]
                undo.callback(blocks.close)
                arguments += ["--blocks-fd", str(theirs.fileno())]
                inherited.append(theirs.fileno())
            for _ in range(settings.num_ranks):
                ours, theirs = socket.socketpair()
                handed_over.enter_context(theirs)
                channels.append(Channel(ours, AgentMessage))  # type: ignore[arg-type]
                channels[-1].send_timeout_s = settings.step_timeout_s
                undo.callback(channels[-1].close)
                given.append(
                    ProcessArguments([*arguments, "--socket-fd", str(theirs.fileno())], [*inherited, theirs.fileno()])
                )
            process = start_processes(given)
        undo.callback(process.wait_or_kill, 0.0)
        return process, join_channels(channels), blocks
