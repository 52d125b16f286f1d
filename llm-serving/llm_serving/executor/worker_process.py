"""The process of a WorkAgent, and the way to it."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Final, Protocol

import msgspec

from llm_serving.core.enums import describe_exit
from llm_serving.log import get_logger
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import AgentMessage

logger = get_logger(__name__)

AgentChannel = Channel[AgentMessage]

KILLED_S: Final = 10.0
"""Seconds in which a process ends that was killed, unless the system itself holds it, as a driver may that hangs."""


class AgentLink(Protocol):
    """What is said to a WorkAgent and by it, as by a `Channel`."""

    def fileno(self) -> int:
        """Of a descriptor that becomes readable when it says something or is gone."""

    def send(self, message: msgspec.Struct) -> None: ...

    def receive(self, timeout_s: float | None = None) -> AgentMessage: ...

    def close(self) -> None: ...


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
        """Waits for its end, for this long at most, and then kills it; None: it was killed before.

        One that the system does not let end is left behind.
        """


class LocalProcess(subprocess.Popen[bytes]):
    """A process of this machine, whose standard input is a pipe."""

    @property
    def has_ended(self) -> bool:
        return self.poll() is not None

    @property
    def described_end(self) -> str:
        return describe_exit(self.returncode)

    def end(self, timeout_s: float | None) -> None:
        if self.stdin is not None:
            self.stdin.close()
        try:
            self.wait(KILLED_S if timeout_s is None else timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(KILLED_S)
        if self.returncode is None:
            logger.error("WorkAgent (pid %d) was killed and does not end; nobody waits for it any more", self.pid)
