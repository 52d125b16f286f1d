"""WorkAgent processes that are forked from a process that has imported MindSpore, instead of started.

An import of MindSpore takes 1.6 s of a core, many times what a small model takes to load. A forked WorkAgent has the
arguments, descriptors, environment and session of a started one, and is a child of this process as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from llm_serving.core.process import command_of, set_mindspore_environment
from llm_serving.executor.worker_process import LocalProcess

_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES, _MAX_FDS = 2**17, 32
"""Sizes of a request: the environment is part of it."""
_ENDS = contextlib.ExitStack()
"""Ends the process that forks: closes the connection to it, then waits for it."""
atexit.register(_ENDS.close)


class ForkedProcess(LocalProcess):
    """A WorkAgent that the process of `_forks` forks, with the interface of one that this process has started."""

    def _execute_child(self, command: Sequence[str], *options: Any) -> None:
        """Do what `subprocess.Popen` does with the descriptors and the environment."""
        pass_fds, env, stdin = options[3], options[5], options[9]
        module = command_of("llm_serving.work_agent")
        assert list(command[: len(module)]) == module
        request = {
            "arguments": command[len(module) :],
            "fds": [0, 1, 2, *pass_fds],
            "environment": dict(os.environ if env is None else env),
            "parent": os.getpid(),
        }
        forks, subreaper = _forks(), ctypes.CDLL(None).prctl
        subreaper(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of descendants become children of this process
        try:
            socket.send_fds(forks, [json.dumps(request).encode()], [stdin, 1, 2, *pass_fds])
            self.pid = int(forks.recv(16))
        finally:
            subreaper(_PR_SET_CHILD_SUBREAPER, 0)
        self._child_created = True
        os.close(stdin)


@cache
def _forks() -> socket.socket:
    """Start the process that forks; return the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
        command = [sys.executable, "-m", "support.agent_forks", str(theirs.fileno())]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )

    _ENDS.callback(process.wait)
    return _ENDS.enter_context(ours)


def end_forks() -> None:
    """End the process that forks, if there is one. The next WorkAgent starts another."""
    _forks.cache_clear()
    _ENDS.close()


# --- in the process that forks ----------------------------------------------------------------------------------------


def main(connection: socket.socket) -> None:
    gc.disable()
    set_mindspore_environment()
    importlib.import_module("llm_serving.work_agent")
    while True:
        text, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, _MAX_FDS)
        if not text:
            return
        waiting, reparented = os.pipe()
        orphaning = os.fork()
        if orphaning == 0:
            if os.fork():
                os._exit(0)
            os.close(reparented)
            os.read(waiting, 1)
            connection.send(b"%d" % os.getpid())
            os.close(waiting)
            os.close(connection.detach())
            _run(fds, **json.loads(text))
        os.waitpid(orphaning, 0)
        for fd in (reparented, waiting, *fds):
            os.close(fd)


def _run(
    received: Sequence[int], arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str], parent: int
) -> NoReturn:
    """Run the WorkAgent in this process, with the received descriptors at the numbers `fds`."""
    status = 1
    try:
        assert os.getppid() == parent
        os.setsid()
        above = max(*received, *fds) + 1
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in received]
        for fd in received:
            os.close(fd)
        for fd, wanted in zip(moved, fds, strict=True):
            os.dup2(fd, wanted)
            os.close(fd)
        os.environ.clear()
        os.environ.update(environment)
        set_mindspore_environment()
        status = importlib.import_module("llm_serving.work_agent").main(arguments)
        logging.shutdown()
    except BaseException:  # noqa: BLE001  the fork must not return to `main`
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
