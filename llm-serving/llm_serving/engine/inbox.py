"""The inbox of an engine, which receives messages from other threads."""

from __future__ import annotations

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from llm_serving.errors import WorkerDiedError


class Inbox:
    """Functions that the engine's thread calls in order between two steps.

    Any thread may call `post`, `wake` and `end`.
    """

    def __init__(self) -> None:
        self.messages: deque[Callable[[], None]] = deque()
        self.ended: str | None = None
        """Reason why the inbox accepts no more messages; None: it accepts them."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the inbox ends, in any thread."""
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def post(self, message: Callable[[], None]) -> None:
        """Add a function, and wake the engine's thread. Raise WorkerDiedError if the inbox has ended."""
        with self._lock:
            if self.ended is not None:
                raise WorkerDiedError(self.ended)
            self.messages.append(message)
            os.eventfd_write(self._wake_fd, 1)

    def wake(self) -> None:
        """End the current `wait`, or, if there is none, the next."""
        with self._lock:
            if self.ended is None:  # after the end, the descriptor may belong to another file
                os.eventfd_write(self._wake_fd, 1)

    def handle(self) -> None:
        """Call all functions, including those that arrive meanwhile."""
        while self.messages:
            self.messages.popleft()()

    def wait(self, other_fd: int | None, timeout_s: float | None) -> bool:
        """Sleep until `wake` is called, `other_fd` is readable or `timeout_s` has passed.

        Return whether `other_fd` is readable and `wake` was not called.
        """
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if other_fd is not None:
            poll.register(other_fd, select.POLLIN)
        ready = dict(poll.poll(None if timeout_s is None else math.ceil(1000 * timeout_s)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            return False
        return other_fd in ready

    def end(self, reason: str) -> None:
        """Accept no more messages. `handle` still calls those that have arrived."""
        with self._lock:
            self.ended = self.ended or reason
        self.on_end()

    def close(self, reason: str) -> None:
        self.end(reason)
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
