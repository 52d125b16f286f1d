"""Confined processes for work on untrusted input. They have limited memory and CPU time, and cannot write files.

The kernel terminates a process that exceeds its CPU time. A thread could not be terminated in this way.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from llm_serving.core.process import command_of
from llm_serving.transport.channel import Channel

ANSWER_TIMEOUT_S: Final = 60.0
"""Maximum seconds to wait for an answer. It is far above the CPU limit, because the process may wait for a core."""
_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")

Answer = TypeVar("Answer")


class ConfinedProcess(Generic[Answer]):
    """A confined process, as its parent, the master, uses it.

    The process runs `main` of `module`. It exits when the master closes the socket between the two processes.
    """

    def __init__(self, module: str, cpu_seconds: float, answers: type[Answer]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            options = ("--socket-fd", str(theirs.fileno()), "--cpu-seconds", str(cpu_seconds))
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            # The process has a session of its own, because Ctrl-C signals the whole process group of the master.
            self._process = subprocess.Popen(  # noqa: S603
                command_of(module, *options),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        self._channel: Channel[Answer] = Channel(ours, answers)
        self.end = weakref.finalize(self, _end, self._process, self._channel)

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: msgspec.Struct) -> Answer:
        """Send a question and return the answer. Raise TransportError if the process has exited or does not answer."""
        self._channel.send(question)
        return self._channel.receive(ANSWER_TIMEOUT_S)


def _end(process: subprocess.Popen[bytes], channel: Channel[Any]) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


# --- in the confined process ------------------------------------------------------------------------------------------


def confine(max_memory_bytes: int) -> None:
    """Limit this process to `max_memory_bytes` of further address space, and prevent it from writing files."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    for limit, most in (
        (resource.RLIMIT_AS, num_pages * resource.getpagesize() + max_memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (most, most))


@contextlib.contextmanager
def within(cpu_seconds: float) -> Iterator[None]:
    """Return a context that terminates this process if it uses more than `cpu_seconds`, even inside a C call."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the default action of its signal ends the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
