"""Which start a connection belongs to: the one whose token it shows, and once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue

from llm_serving.executor.agent_process import AgentChannel


class Arrivals:
    """The starts that wait for their WorkAgent; from any thread.

    A token is of one start. Whoever shows that of an earlier one, or shows one again, comes too late: he is given to
    nobody, and what he says is read by nobody.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected: dict[str, SimpleQueue[AgentChannel]] = {}

    @contextmanager
    def expecting(self, token: str) -> Iterator[Arrival]:
        """A connection that shows the token belongs to whoever is inside; one only, a second finds nobody."""
        queue: SimpleQueue[AgentChannel] = SimpleQueue()
        with self._lock:
            self._expected[token] = queue
        try:
            yield Arrival(queue)
        finally:
            with self._lock:
                self._expected.pop(token, None)
            with contextlib.suppress(Empty):  # it came when nobody waited any more
                queue.get_nowait().close()

    def come(self, token: str, channel: AgentChannel) -> bool:
        """Gives a connection to the start of the token; False: nobody expects it (any more)."""
        with self._lock:
            queue = self._expected.pop(token, None)
            if queue is not None:
                queue.put(channel)
        return queue is not None


class Arrival:
    """Of one WorkAgent."""

    def __init__(self, queue: SimpleQueue[AgentChannel]) -> None:
        self._queue = queue

    def wait(self, timeout_s: float) -> AgentChannel | None:
        """The channel to it; None: it has not come in this time."""
        try:
            return self._queue.get(timeout=timeout_s)
        except Empty:
            return None
