"""Brings blocks of requests that move from one machine to another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from llm_serving.core.clock import Clock, monotonic
from llm_serving.errors import WorkerError
from llm_serving.kvcache.exports import TransferBlock
from llm_serving.log import get_logger
from llm_serving.transport.messages import Blocks

logger = get_logger(__name__)


class Link(Protocol):
    """As `BlockLink`."""

    blocks_a_frame: int
    timeout_s: float

    def held(self) -> AbstractContextManager[None]: ...

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[Blocks, None, None]: ...

    def write(self, frames: Iterable[Blocks]) -> None: ...


class Carrier:
    """Through the master, frame by frame: read from one WorkAgent, written to the other.

    There is a thread for each replica that blocks are read from, which brings one request's after another's. So frames
    on their way are a few for each such replica (`FRAMES_UNDER_WAY`), however much is to be moved; and they have
    connections of their own, so none is before a step's.
    """

    def __init__(self) -> None:
        self._threads: dict[int, ThreadPoolExecutor] = {}

    def carry(
        self,
        replica: int,
        blocks: Sequence[TransferBlock],
        source: Link,
        target: Link,
        done: Callable[[bool], None],
    ) -> None:
        """Begins to bring blocks of a replica to the pool behind `target`.

        `done` is called in another thread: whether all of them are there.
        """
        if replica not in self._threads:
            self._threads[replica] = ThreadPoolExecutor(1, f"carrier-{replica}")
        self._threads[replica].submit(lambda: done(carried(blocks, source, target)))

    def close(self) -> None:
        """Waits for what is under way, which ends when its WorkAgents do."""
        for thread in self._threads.values():
            thread.shutdown()


def carried(blocks: Sequence[TransferBlock], source: Link, target: Link, clock: Clock = monotonic) -> bool:
    """Whether all of them are where they shall be. Returns when nothing is under way any more."""
    try:
        with contextlib.ExitStack() as both:
            for link in sorted((source, target), key=id):  # in one order, so that no two wait for each other
                both.enter_context(link.held())
            pieces = _pieces(blocks, min(source.blocks_a_frame, target.blocks_a_frame))
            in_time = _until(clock, clock() + source.timeout_s, pieces)
            with contextlib.closing(source.read(in_time)) as frames:
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
    clock: Clock, deadline: float, pieces: Iterable[Sequence[TransferBlock]]
) -> Iterator[Sequence[TransferBlock]]:
    """Whoever answers each question late, and none too late, does not keep a request waiting for ever."""
    for piece in pieces:
        if clock() > deadline:
            raise WorkerError("it takes longer than a step may (serving_config.step_timeout_s)")
        yield piece
