"""Threads for work whose length clients choose, shared out by time among those who ask."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_Piece = tuple["Future[Any]", Callable[[], Any]]


class FairThreads:
    """A pool of threads in which whoever has had least of their time is next.

    Start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queueing", SIGCOMM 1996, section 2), by times that
    are known afterwards: whoever asked for nothing meanwhile has saved nothing up, and begins level with the one that
    is served. So a newcomer waits for what is running, and for at most one piece of each of the others.

    Args:
        num_threads: Pieces of work that are done at once.
        name: Of the threads.
        clock: Seconds; tests bring their own.
    """

    def __init__(self, num_threads: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Piece]] = {}
        self._had_s: dict[str, float] = {}
        """What each has had, of those who are ahead of `_served_s`."""
        self._served_s = 0.0
        """What the one that was served last had had."""

    def submit(self, owner: str, work: Callable[[], T]) -> Future[T]:
        """Has work done when it is the owner's turn; what is cancelled before is not done."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((future, work))
        self._pool.submit(self._do_next)
        return future

    def _do_next(self) -> None:
        with self._lock:
            owner = min(self._waiting, key=self._had)
            (future, work), queue = self._waiting[owner].popleft(), self._waiting[owner]
            if not queue:
                del self._waiting[owner]
            if not future.set_running_or_notify_cancel():
                return
            self._had_s[owner] = self._served_s = self._had(owner)
        began = self._clock()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  whoever waits for it is told
            self._charge(owner, self._clock() - began)
            future.set_exception(error)
        else:
            self._charge(owner, self._clock() - began)
            future.set_result(result)
        finally:
            del future, work  # an error refers to this call, and through it to all that it was about

    def _had(self, owner: str) -> float:
        return max(self._had_s.get(owner, 0.0), self._served_s)

    def _charge(self, owner: str, seconds: float) -> None:
        with self._lock:
            self._had_s[owner] = self._had(owner) + seconds
            self._had_s = {each: had for each, had in self._had_s.items() if had > self._served_s}
