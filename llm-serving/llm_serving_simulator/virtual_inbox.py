"""The inbox of a simulated engine, which no thread waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from llm_serving.engine.inbox import Inbox
from llm_serving.errors import WorkerDiedError


class VirtualInbox(Inbox):
    """Takes no descriptor of the operating system, of which there are fewer than there may be replicas.

    Args:
        on_post: Told of each message.
    """

    def __init__(self, on_post: Callable[[], None]) -> None:
        self.ended: str | None = None
        self.on_end: Callable[[], None] = lambda: None
        self._messages: deque[Callable[[], None]] = deque()
        self._on_post = on_post

    def post(self, message: Callable[[], None]) -> None:
        if self.ended is not None:
            raise WorkerDiedError(self.ended)
        self._messages.append(message)
        self._on_post()

    def wake(self) -> None:
        """Nobody sleeps."""

    def end(self, reason: str) -> None:
        self.ended = self.ended or reason
        self.on_end()

    def close(self, reason: str) -> None:
        self.end(reason)
