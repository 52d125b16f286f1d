"""Brings blocks of requests that move from one machine to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from llm_serving.errors import WorkerError
from llm_serving.kvcache.exports import TransferBlock
from llm_serving.log import get_logger
from llm_serving.transport.messages import Blocks

logger = get_logger(__name__)


class Link(Protocol):
    """As `BlockLink`."""

    blocks_a_frame: int

    def read(self, blocks: Sequence[TransferBlock]) -> Blocks: ...

    def write(self, blocks: Blocks) -> None: ...


class Carrier:
    """Through the master, a frame at a time: read from one WorkAgent, then written to the other.

    There is a thread for each replica that blocks are read from, so there are never more frames on their way than
    such replicas, however much is to be moved; and they have connections of their own, so none is before a step's.
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


def carried(blocks: Sequence[TransferBlock], source: Link, target: Link) -> bool:
    """Whether all of them are where they shall be."""
    try:
        for piece in _pieces(blocks, min(source.blocks_a_frame, target.blocks_a_frame)):
            target.write(source.read(piece))
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
