"""A process that does one kind of work for clients or models, and may do nothing else.

Some work has no bound that could be told before it is done, and no thread can be stopped in the midst of it. Such a
process has little memory and little time for each question; when either is used up, or it breaks, it ends, and only it.
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
"""Far beyond the time that a process gives itself: it may have to wait for a core."""
_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")

Answer = TypeVar("Answer")


class ConfinedProcess(Generic[Answer]):
    """The master's end of one; it ends with its end of the sockets.

    Args:
        module: Whose `main` takes `--socket-fd` and `--cpu-seconds`.
        cpu_seconds: Most time for one question.
        answers: The union of its answers.
    """

    def __init__(self, module: str, cpu_seconds: float, answers: type[Answer]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            options = ("--socket-fd", str(theirs.fileno()), "--cpu-seconds", str(cpu_seconds))
            environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
            # A session of its own: Ctrl-C reaches the whole group of the master.
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
        """The answer to one question; waits for it.

        Raises:
            TransportError: The process has ended, or does not answer.
        """
        self._channel.send(question)
        return self._channel.receive(ANSWER_TIMEOUT_S)


def _end(process: subprocess.Popen[bytes], channel: Channel[Any]) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


# --- in the process itself --------------------------------------------------------------------------------------------


def confine(max_memory_bytes: int) -> None:
    """Lets this process have so many bytes of addresses beyond those it has, and write no file."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    for limit, most in (
        (resource.RLIMIT_AS, num_pages * resource.getpagesize() + max_memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (most, most))


@contextlib.contextmanager
def within(cpu_seconds: float) -> Iterator[None]:
    """Ends this process when what is done inside takes longer, also in the midst of a call."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # that is what its signal does by default
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
