"""Starts what computes a replica: the process of a WorkAgent, or all its ranks."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llm_serving.core.own_process import command_of
from llm_serving.executor.agent_process import LocalProcess
from llm_serving.executor.ranks import RankProcesses
from llm_serving.transport.rank_memory import rank_memory


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
