"""Brings blocks of requests that move from one machine to another."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Final, Protocol

from llm_serving.core.clock import Clock, monotonic
from llm_serving.errors import WorkerError
from llm_serving.kvcache.exports import TransferBlock
from llm_serving.log import get_logger
from llm_serving.transport.messages import Blocks

logger = get_logger(__name__)

MAX_REQUESTS: Final = 64
"""Whose blocks are to be brought from one replica at a time."""
MAX_BYTES: Final = 2**30
"""Of all these blocks, but for one request's: what a link of 10 Gbit/s takes a second for."""


class Link(Protocol):
    """As `BlockLink`."""

    blocks_a_frame: int
    block_bytes: int
    timeout_s: float

    def held(self, timeout_s: float) -> AbstractContextManager[None]: ...

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[Blocks, None, None]: ...

    def write(self, frames: Iterable[Blocks]) -> None: ...


class Carrier:
    """Through the master, frame by frame: read from one WorkAgent, written to the other.

    There is a thread for each replica that blocks are read from, which brings one request's after another's. So frames
    on their way are a few for each such replica (`FRAMES_UNDER_WAY`), however much is to be moved; and they have
    connections of their own, so none is before a step's. What a thread has before it is bounded too, in requests and
    bytes; and in time, since each request is given up `Link.timeout_s` after it came.

    Args:
        rest: Is called by these threads before each frame, and after each request: gives way to who forms steps.
        clock: For the time that requests may take.
    """

    def __init__(self, rest: Callable[[], None] = lambda: None, clock: Clock = monotonic) -> None:
        self._rest = rest
        self._clock = clock
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._lock = threading.Lock()
        self._num_requests: Counter[int] = Counter()
        """By replica: whose blocks have not been brought."""
        self._num_bytes: Counter[int] = Counter()
        """Of these blocks."""

    def carry(
        self,
        replica: int,
        blocks: Sequence[TransferBlock],
        source: Link,
        target: Link,
        done: Callable[[bool], None],
    ) -> bool:
        """Begins to bring blocks of a replica to the pool behind `target`, unless there is too much before them, or no
        thread to be had.

        `done` is called in another thread: whether all of them are there.
        """
        num_bytes = len(blocks) * source.block_bytes
        with self._lock:
            count = self._num_requests[replica]
            if count >= MAX_REQUESTS or (count and self._num_bytes[replica] + num_bytes > MAX_BYTES):
                return False
            self._num_requests[replica] += 1
            self._num_bytes[replica] += num_bytes
        deadline = self._clock() + source.timeout_s

        def bring() -> None:
            there = carried(blocks, source, target, deadline, self._clock, self._rest)
            self._done(replica, num_bytes)
            done(there)
            self._rest()

        thread = self._threads.get(replica) or ThreadPoolExecutor(1, f"carrier-{replica}")
        try:
            thread.submit(bring)
        except RuntimeError:  # none can be had now, or it is closed
            self._done(replica, num_bytes)
            return False
        self._threads[replica] = thread
        return True

    def close(self) -> None:
        """Waits for what is under way, which ends when its WorkAgents do."""
        for thread in self._threads.values():
            thread.shutdown()

    def _done(self, replica: int, num_bytes: int) -> None:
        with self._lock:
            self._num_requests[replica] -= 1
            self._num_bytes[replica] -= num_bytes


def carried(
    blocks: Sequence[TransferBlock],
    source: Link,
    target: Link,
    deadline: float,
    clock: Clock = monotonic,
    rest: Callable[[], None] = lambda: None,
) -> bool:
    """Whether all of them are where they shall be. Returns when nothing is under way any more.

    No frame is begun after the deadline; the answer to one that was has its own. Before each it may `rest`.
    """
    try:
        with contextlib.ExitStack() as both:
            for link in sorted((source, target), key=id):  # in one order, so that no two wait for each other
                both.enter_context(link.held(max(0.0, deadline - clock())))
            pieces = _pieces(blocks, min(source.blocks_a_frame, target.blocks_a_frame))
            with contextlib.closing(source.read(_until(clock, deadline, pieces, rest))) as frames:
                target.write(frames)
    except WorkerError as error:
        logger.warning("what a request takes along is lost on its way, and is computed again: %s", error)
        return False
    except Exception:  # whoever waits for them is told all the same
        logger.exception("blocks were not brought; what they hold is computed again")
        return False
    return True


def _pieces(blocks: Sequence[TransferBlock], count: int) -> Iterator[Sequence[TransferBlock]]:
    for start in range(0, len(blocks), count):
        yield blocks[start : start + count]


def _until(
    clock: Clock, deadline: float, pieces: Iterable[Sequence[TransferBlock]], rest: Callable[[], None]
) -> Iterator[Sequence[TransferBlock]]:
    """Whoever answers each question late, and none too late, does not keep a request waiting for ever."""
    for piece in pieces:
        rest()
        if clock() > deadline:
            raise WorkerError("it takes longer than a step may (serving_config.step_timeout_s)")
        yield piece
