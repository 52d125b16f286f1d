"""The process of a WorkAgent and the connection to it."""

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

KILL_TIMEOUT_S: Final = 10.0
"""Seconds to wait until a killed process has exited. It may be stuck in the kernel, for example in a driver."""


class AgentLink(Protocol):
    """Connection to a WorkAgent: a `Channel` or `RankChannels`."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message arrives or the WorkAgent has exited."""

    def send(self, message: msgspec.Struct) -> None: ...

    def receive(self, timeout_s: float | None = None) -> AgentMessage: ...

    def close(self) -> None: ...


class AgentProcess(Protocol):
    """The supervisor's interface to the process of a WorkAgent."""

    @property
    def pids(self) -> list[int]:
        """Process ids on this machine, one for each rank; empty: the WorkAgent runs on another machine."""

    @property
    def has_exited(self) -> bool: ...

    @property
    def exit_description(self) -> str:
        """How the WorkAgent exited, for example "code 3". Valid only after the exit."""

    def kill(self) -> None: ...

    def wait_or_kill(self, timeout_s: float | None) -> None:
        """Wait at most `timeout_s` seconds for the exit, then kill the process. None: the process was killed."""


class LocalProcess(subprocess.Popen[bytes]):
    """A process of this machine whose standard input is a pipe."""

    @property
    def pids(self) -> list[int]:
        return [self.pid]

    @property
    def has_exited(self) -> bool:
        return self.poll() is not None

    @property
    def exit_description(self) -> str:
        return describe_exit(self.returncode)

    def wait_or_kill(self, timeout_s: float | None) -> None:
        if self.stdin is not None:
            self.stdin.close()
        try:
            self.wait(KILL_TIMEOUT_S if timeout_s is None else timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(KILL_TIMEOUT_S)
        if self.returncode is None:
            logger.error("WorkAgent (pid %d) was killed but does not exit; the master stops waiting for it", self.pid)
