"""The WorkAgent's thread that serves the master's requests for KV blocks. This module must not import MindSpore."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from llm_serving.core.timings import Clock
from llm_serving.errors import ProtocolError, WorkerError
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import (
    BlockContents,
    BlocksLoaded,
    BlocksRefused,
    BlocksStored,
    BlocksWritten,
    LoadBlocks,
    MasterMessage,
    ReadBlocks,
    StoreBlocks,
)
from llm_serving.worker.disk_store import DiskStore

SHARE: Final = 0.1
"""Maximum fraction of a core for background work while steps run."""


class BlockStore(Protocol):
    """The methods of `worker.kv_cache.TransferMemory`. An import of that class would import MindSpore."""

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]: ...

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None: ...


def serve_blocks(
    channel: Channel[MasterMessage],
    pool: BlockStore,
    pause_after: Callable[[float], None] = lambda took_s: None,
    clock: Clock = time.thread_time,
    disk: DiskStore | None = None,
    block_size: int = 0,
) -> None:
    """Answer the master's requests for blocks until the connection fails. After each answer, call `pause_after` with
    the CPU seconds that the answer took by `clock`. Make no pause after reads from disk, because a request waits for
    the blocks. `block_size` is the number of tokens in each block of `disk`.
    """
    began = clock()
    while True:
        message = channel.receive()
        channel.send(_answer(message, pool, disk, block_size))
        ended = clock()
        if not isinstance(message, LoadBlocks):  # a pause would delay the request that waits for the blocks
            pause_after(ended - began)
        began = ended


def _answer(
    message: MasterMessage, pool: BlockStore, disk: DiskStore | None, block_size: int
) -> BlockContents | BlocksWritten | BlocksLoaded | BlocksStored | BlocksRefused:
    try:
        if isinstance(message, ReadBlocks):
            return BlockContents(message.block_ids, message.epochs, *pool.read(message.block_ids, message.epochs))
        if isinstance(message, BlockContents):
            pool.write(message.block_ids, message.epochs, message.num_written, message.content)
            return BlocksWritten(message.block_ids, message.epochs)
        if disk is not None and isinstance(message, LoadBlocks):
            return _load(message, pool, disk, block_size)
        if disk is not None and isinstance(message, StoreBlocks):
            return _store(message, pool, disk, block_size)
    except WorkerError as error:
        return BlocksRefused(str(error))
    raise ProtocolError(f"the master must send requests for blocks on this connection. Received: {str(message)[:100]}")


def _load(message: LoadBlocks, pool: BlockStore, disk: DiskStore, block_size: int) -> BlocksLoaded:
    num_stored, num_damaged = disk.touch(message.hashes), disk.num_damaged
    stop = min(num_stored, message.start + len(message.block_ids))
    num_read = 0
    for index in range(message.start, stop):
        content = disk.read(message.hashes[index])
        if content is None:
            for each in message.hashes[index + 1 : stop]:  # deletes other damaged files
                disk.read(each)
            num_stored = index
            break
        pool.write([message.block_ids[num_read]], [message.epochs[num_read]], [block_size], content)
        num_read += 1
    return BlocksLoaded(num_stored, num_read, disk.num_damaged - num_damaged, disk.num_bytes)


def _store(message: StoreBlocks, pool: BlockStore, disk: DiskStore, block_size: int) -> BlocksStored:
    num_written = num_evicted = 0
    for block_hash, block_id, epoch in zip(message.hashes, message.block_ids, message.epochs, strict=True):
        tokens, content = pool.read([block_id], [epoch])
        if tokens != [block_size]:
            raise WorkerError(f"block {block_id} of the transfer pool is not full")
        written = disk.write(block_hash, content)
        num_written += written.is_new
        num_evicted += written.num_evicted
    return BlocksStored(num_written, num_evicted, disk.num_bytes)


class BackgroundThrottle:
    """Slows a background thread down while steps run. The thread calls `pause_after` after each small piece of work."""

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._num_started = self._num_seen = 0
        self._is_running = False

    @contextlib.contextmanager
    def step_running(self) -> Iterator[None]:
        self._num_started += 1
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def pause_after(self, took_s: float) -> None:
        """If a step ran during the work, sleep so long that work and sleep together use the fraction `SHARE` of a core.
        `took_s`: CPU seconds of the work.
        """
        num_started = self._num_started
        if self._is_running or num_started > self._num_seen:
            self._pause(took_s * (1 / SHARE - 1))
        self._num_seen = num_started
