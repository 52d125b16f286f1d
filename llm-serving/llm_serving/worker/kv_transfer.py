"""The KV transfer pool, by which WorkAgents hand blocks over to each other, and the thread that serves it to the
master.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import mindspore as ms
import numpy as np

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import bytes_of_block, storage_dtype
from llm_serving.core.step import Int32Array
from llm_serving.core.timings import Clock
from llm_serving.errors import ProtocolError, WorkerError
from llm_serving.transport.channel import Channel
from llm_serving.transport.messages import BlockContents, BlocksRefused, BlocksWritten, MasterMessage, ReadBlocks
from llm_serving.transport.shared_memory import MAX_TOKENS_PER_BLOCK

_PAGE = 4096
_MAX_EPOCH = 2**31 - 1
SHARE: Final = 0.1
"""Largest share of a core that background work may use while steps run."""


class TransferMemory:
    """A pool of KV blocks in an anonymous file that the master created.

    All WorkAgents of one machine inherit the same file. A WorkAgent of another machine has its own; the master copies
    blocks between pools by `read` and `write`. All replicas have the same model and settings, so the layout is the
    same. The first user sets the size; pages are allocated when first written.

        | epoch, tokens written: int32 [num_blocks, 2] | keys of layer 0 [num_blocks, ...] | values of layer 0 | ...

    The master decides which WorkAgent writes a block when; readers check the epoch.
    """

    def __init__(self, fd: int, num_blocks: int, layers: Sequence[tuple[ms.Parameter, ms.Parameter]]) -> None:
        """Map the file behind `fd`, which the caller keeps, for blocks like those of `layers`."""
        self.num_blocks = num_blocks
        sizes = list(_sizes(num_blocks, layers))
        length = _whole_pages(8 * num_blocks) + sum(sizes)
        os.ftruncate(fd, length)
        self._memory = memory = mmap.mmap(fd, length)
        tags: Int32Array = np.frombuffer(memory, np.int32, 2 * num_blocks).reshape(num_blocks, 2)
        self.epochs: Int32Array = tags[:, 0]
        self.num_written: Int32Array = tags[:, 1]
        offset, arrays = _whole_pages(8 * num_blocks), list[Array]()
        for cache, size in zip((each for layer in layers for each in layer), sizes, strict=True):
            shape = num_blocks, *cache.shape[1:]
            elements = np.frombuffer(memory, storage_dtype(cache), math.prod(shape), offset)
            arrays.append(elements.reshape(shape))
            offset += size
        self.layers: tuple[tuple[Array, Array], ...] = tuple(zip(arrays[::2], arrays[1::2], strict=True))
        self._arrays = arrays

    @property
    def block_bytes(self) -> int:
        return sum(array[0].nbytes for array in self._arrays)

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]:
        """Return the tokens written in each block, and the contents in the order of `transport.messages.BlockContents`.

        Raises:
            WorkerError: A block does not exist or has another epoch.
        """
        ids = self._ids(block_ids, epochs)
        num_written = self.num_written[ids].tolist()
        self._check_owners(ids, epochs)
        content = b"".join([array[ids].tobytes() for array in self._arrays])
        self._check_owners(ids, epochs)
        return num_written, content

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None:
        """Write contents as `read` returns them. The blocks are unreadable until it is done.

        Raises:
            WorkerError: A block does not exist, or the contents or numbers are invalid.
        """
        ids = self._ids(block_ids, epochs)
        if (len(num_written), len(content)) != (len(ids), len(ids) * self.block_bytes):
            rule = f"{len(ids)} blocks must come with {len(ids) * self.block_bytes} bytes, each with its tokens"
            raise WorkerError(f"{rule}. Given: {len(content)} bytes, tokens of {len(num_written)}")
        if not all(0 < each <= MAX_TOKENS_PER_BLOCK for each in num_written) or max(epochs) > _MAX_EPOCH:
            rule = f"blocks must have 1 to {MAX_TOKENS_PER_BLOCK} tokens each and epochs up to {_MAX_EPOCH}"
            raise WorkerError(f"{rule}. Given: {list(num_written)}, epochs {list(epochs)}")
        self.num_written[ids] = 0
        offset = 0
        for array in self._arrays:
            shape = len(ids), *array.shape[1:]
            given = np.frombuffer(content, array.dtype, math.prod(shape), offset)
            array[ids] = given.reshape(shape)
            offset += given.nbytes
        self.epochs[ids] = epochs
        self.num_written[ids] = num_written

    def _ids(self, block_ids: Sequence[int], epochs: Sequence[int]) -> list[int]:
        ids = list(block_ids)
        if not ids or len(set(ids)) != len(ids) or len(epochs) != len(ids):
            raise WorkerError(f"blocks must be named once, each with its epoch. Given: {ids}, epochs {list(epochs)}")
        if not 0 <= min(ids) <= max(ids) < self.num_blocks:
            raise WorkerError(f"blocks of the transfer pool must be from 0 to {self.num_blocks - 1}. Given: {ids}")
        return ids

    def _check_owners(self, ids: list[int], epochs: Sequence[int]) -> None:
        others = (self.epochs[ids] != epochs) | (self.num_written[ids] <= 0)
        if others.any():
            raise WorkerError(f"block {ids[int(np.flatnonzero(others)[0])]} of the transfer pool has another owner")


def _sizes(num_blocks: int, layers: Sequence[tuple[ms.Parameter, ms.Parameter]]) -> Iterator[int]:
    for cache in (each for layer in layers for each in layer):
        yield _whole_pages(num_blocks * bytes_of_block(cache))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class BlockStore(Protocol):
    """Interface of `TransferMemory`."""

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
    """Serve the master's requests for blocks in a thread of its own, until the connection ends with a TransportError.

    `pause_after` is called after each frame with the CPU seconds it took; `clock` is the CPU time of this thread.
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
    """Slows a background thread down while steps run. The background thread works in small pieces."""

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._num_started = self._num_seen = 0
        self._is_running = False

    @contextlib.contextmanager
    def step_running(self) -> Iterator[None]:
        """Mark a step as running while inside."""
        self._num_started += 1
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def pause_after(self, took_s: float) -> None:
        """Wait until a piece that took this much CPU time is at most `SHARE` of the elapsed time.

        Do not wait if no step ran since the previous piece.
        """
        num_started = self._num_started
        if self._is_running or num_started > self._num_seen:
            self._pause(took_s * (1 / SHARE - 1))
        self._num_seen = num_started
