"""The process of a WorkAgent, the connection to it, the state of its restart, and the cancellation of starts."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from llm_serving.core.enums import describe_exit
from llm_serving.log import get_logger
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import AgentMessage

logger = get_logger(__name__)

AgentChannel = Channel[AgentMessage]

KILL_TIMEOUT_S: Final = 10.0
"""Seconds to wait until a killed process has exited. It may be stuck in the kernel, for example in a driver."""
SLOW_FACTOR: Final = 2.0
"""No remaining time is predicted once an attempt has taken this many times as long as the first start."""


class AgentProcess(Protocol):
    @property
    def pids(self) -> list[int]:
        """Process ids on this machine, one for each rank. Empty if the WorkAgent runs on another machine."""

    @property
    def has_exited(self) -> bool: ...

    @property
    def exit_description(self) -> str:
        """How the WorkAgent exited, for example "code 3". Valid only after the exit."""

    def kill(self) -> None: ...

    def wait_or_kill(self, timeout_s: float | None) -> None:
        """Wait at most `timeout_s` seconds for the exit, then kill the process. Pass None if it was killed already."""


class LocalProcess(subprocess.Popen[bytes]):
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


@dataclass(frozen=True, slots=True)
class RestartStatus:
    """State of a restart, with times on the engine's clock. Only the engine's thread writes it."""

    reason: str
    lost_at: float
    attempt_at: float
    load_s: float
    num_failed: int
    num_restarts: int
    max_restarts: int

    @property
    def restarts_exhausted(self) -> bool:
        return self.num_restarts > self.max_restarts

    def predicted_s(self, now: float) -> float | None:
        """Return the predicted seconds until the WorkAgent is ready. Return None if an attempt has failed, if there
        were too many restarts, or if this attempt already takes much longer than the first start.
        """
        if self.num_failed or self.restarts_exhausted or now - self.attempt_at > SLOW_FACTOR * self.load_s:
            return None
        return max(self.attempt_at + self.load_s - now, 0.0)

    def retry_after_s(self, now: float) -> float:
        """Return after how many seconds a client should retry, if this attempt takes as long as the first start."""
        return max(self.attempt_at + self.load_s - now, 1.0)

    def __str__(self) -> str:
        if self.restarts_exhausted:
            return f"completed no step after {self.max_restarts} restarts in a row; retrying: {self.reason}"
        return f"is being restarted: {self.reason}"


class StartCancellation:
    """Cancels all starts of WorkAgents: it ends all `wait` calls and calls the registered callbacks. Thread-safe."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            for callback in self._callbacks:
                callback()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Return a context in which a cancellation calls `callback`, at once if the starts are already cancelled."""
        with self._lock:
            if self._event.is_set():
                callback()
            self._callbacks.append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)
