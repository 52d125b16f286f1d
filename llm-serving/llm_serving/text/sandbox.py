"""Confined processes for work on untrusted input. They have limited memory and CPU time, and cannot write files.

The kernel terminates a process that exceeds its CPU time. A thread could not be terminated in this way.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import resource
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from llm_serving.core.process import command_of
from llm_serving.errors import ChannelClosedError, TransportError
from llm_serving.log import get_logger
from llm_serving.transport.channel import Channel

logger = get_logger(__name__)

ANSWER_TIMEOUT_S: Final = 60.0
"""Maximum seconds to wait for an answer. It is far above the CPU limit, because the process may wait for a core."""
_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ", "VIRTUAL_ENV")

Answer = TypeVar("Answer")


class ConfinedProcess(Generic[Answer]):
    """The master's side of a confined process, which runs `main` of `module` and exits when its socket is closed."""

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


class ConfinedPool(Generic[Answer]):
    """Up to `size` confined processes, which `start` starts on demand. Thread-safe. `purpose`: name in log lines."""

    def __init__(self, size: int, start: Callable[[], ConfinedProcess[Answer]], purpose: str) -> None:
        self._start, self._purpose = start, purpose
        self._free: queue.SimpleQueue[ConfinedProcess[Answer] | None] = queue.SimpleQueue()
        for _ in range(size):
            self._free.put(None)

    def ask(self, question: msgspec.Struct) -> Answer:
        """Wait for a free process and ask it. If it exits or does not answer, terminate it and raise TransportError."""
        process = self._free.get()
        try:
            process = process if process is not None and process.lives else self._start()
            return process.ask(question)
        except TransportError as error:
            text = "Terminating the process %s, which probably exceeded its time or memory limit: error=%s"
            logger.warning(text, self._purpose, error)
            if process is not None:
                process.end()
            process = None
            raise
        finally:
            self._free.put(process)


def _end(process: subprocess.Popen[bytes], channel: Channel[Any]) -> None:
    channel.close()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


# --- in the confined process ------------------------------------------------------------------------------------------


def serve(
    module: str,
    questions: Any,
    answer_to: Callable[[Any], msgspec.Struct],
    argv: Sequence[str] | None,
    max_memory_bytes: int,
) -> int:
    """Confine this process, and answer messages of the type `questions` until the master closes the socket. Return the
    exit code of the process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--socket-fd", type=int, required=True, help="one end of a pair of sockets, inherited")
    parser.add_argument("--cpu-seconds", type=float, required=True, help="most time for one question")
    arguments = parser.parse_args(argv)
    _confine(max_memory_bytes)
    channel: Channel[Any] = Channel(socket.socket(fileno=arguments.socket_fd), questions)
    try:
        while True:
            question = channel.receive()
            with _within(arguments.cpu_seconds):
                answer = answer_to(question)
            channel.send(answer)
    except ChannelClosedError:
        return 0
    except (TransportError, MemoryError):
        return 1


def _confine(max_memory_bytes: int) -> None:
    """Limit this process to `max_memory_bytes` of further address space, and prevent it from writing files."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    for limit, most in (
        (resource.RLIMIT_AS, num_pages * resource.getpagesize() + max_memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(limit, (most, most))


@contextlib.contextmanager
def _within(cpu_seconds: float) -> Iterator[None]:
    """Return a context that terminates this process if it uses more than `cpu_seconds`, even inside a C call."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # the default action of its signal ends the process
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
