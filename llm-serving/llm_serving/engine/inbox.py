"""What other threads ask of the one that reads, and what wakes it to listen."""

from __future__ import annotations

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable

from llm_serving.errors import WorkerDiedError


class Inbox:
    """Messages in the order in which they came.

    `post`, `wake` and `len` are for any thread, all else belongs to the one that reads.
    """

    def __init__(self) -> None:
        self.ended: str | None = None
        """Why nothing is taken any more, once that is so."""
        self.on_end: Callable[[], None] = lambda: None
        """Told, by any thread, when that has become so."""
        self._messages: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __len__(self) -> int:
        return len(self._messages)

    def post(self, message: Callable[[], None]) -> None:
        """
        Raises:
            WorkerDiedError: Nothing is taken any more.
        """
        with self._lock:
            if self.ended is not None:
                raise WorkerDiedError(self.ended)
            self._messages.append(message)
            os.eventfd_write(self._wake_fd, 1)

    def wake(self) -> None:
        """Ends the `wait` of the reader, or its next one."""
        with self._lock:
            if self.ended is None:  # later its descriptor may be somebody else's
                os.eventfd_write(self._wake_fd, 1)

    def take(self) -> None:
        """Does what the messages say, those included that come meanwhile."""
        while self._messages:
            self._messages.popleft()()

    def wait(self, other_fd: int | None, timeout_s: float | None) -> bool:
        """Sleeps until it is woken, another descriptor can be read or so much time has passed.

        Returns:
            Whether it is the other descriptor, and nothing else, that can be read.
        """
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if other_fd is not None:
            poll.register(other_fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            return False
        return other_fd in ready

    def end(self, reason: str) -> None:
        """Takes no more messages; those that have come are left to `take`."""
        with self._lock:
            self.ended = self.ended or reason
        self.on_end()

    def close(self, reason: str) -> None:
        """As `end`, and gives back the descriptor it is woken by: nobody reads it any more."""
        self.end(reason)
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)
