"""The thread that serves the KV transfer pool to the master. It does not import MindSpore, so that a WorkAgent with
another model runner starts without it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from llm_serving.core.timings import Clock
from llm_serving.errors import ProtocolError, WorkerError
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import BlockContents, BlocksRefused, BlocksWritten, MasterMessage, ReadBlocks

SHARE: Final = 0.1
"""Maximum fraction of a core that background work may use while steps run."""


class BlockStore(Protocol):
    """Interface of `worker.kv_cache.TransferMemory`."""

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]: ...

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None: ...


def serve_blocks(
    channel: Channel[MasterMessage],
    pool: BlockStore,
    pause_after: Callable[[float], None] = lambda took_s: None,
    clock: Clock = time.thread_time,
) -> None:
    """Serve the master's requests for blocks in a separate thread, until the connection ends with a TransportError.
    `pause_after` is called after each frame with the CPU seconds it took, measured by `clock`.
    """
    began = clock()
    while True:
        channel.send(_answer(channel.receive(), pool))
        ended = clock()
        pause_after(ended - began)
        began = ended


def _answer(message: MasterMessage, pool: BlockStore) -> BlockContents | BlocksWritten | BlocksRefused:
    try:
        if isinstance(message, ReadBlocks):
            return BlockContents(message.block_ids, message.epochs, *pool.read(message.block_ids, message.epochs))
        if isinstance(message, BlockContents):
            pool.write(message.block_ids, message.epochs, message.num_written, message.content)
            return BlocksWritten(message.block_ids, message.epochs)
    except WorkerError as error:
        return BlocksRefused(str(error))
    raise ProtocolError(f"expected blocks, got {str(message)[:100]}")


class BackgroundThrottle:
    """Slows down a background thread, which works in small pieces, while steps run."""

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._num_started = self._num_seen = 0
        self._is_running = False

    @contextlib.contextmanager
    def step_running(self) -> Iterator[None]:
        """Mark a step as running while the context is active."""
        self._num_started += 1
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def pause_after(self, took_s: float) -> None:
        """Wait until a piece of this much CPU time is at most `SHARE` of the elapsed time, if a step ran meanwhile."""
        num_started = self._num_started
        if self._is_running or num_started > self._num_seen:
            self._pause(took_s * (1 / SHARE - 1))
        self._num_seen = num_started
