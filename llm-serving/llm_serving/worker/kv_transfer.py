"""The transfer pool: memory by which WorkAgents hand blocks of the key/value cache over.

How blocks of a WorkAgent's transfer pool come and go, where it shares no memory with others.

How what a WorkAgent does beside its steps gives way to them.
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
from llm_serving.transport.messages import Blocks, BlocksRefused, BlocksTaken, MasterMessage, SendBlocks
from llm_serving.transport.shared_memory import MAX_TOKENS

_PAGE = 4096
_MAX_EPOCH = 2**31 - 1


class TransferMemory:
    """A file without a name that the master made and every WorkAgent of its machine has inherited.

    A WorkAgent of another machine has one of its own: what others have written comes and goes by `read` and `write`.

    All of them have the same model and settings, so the sizes are the same. It is as long as the first of them makes
    it; its pages are taken when they are first written.

        | epoch, tokens written: int32 [num_blocks, 2] | keys of layer 0 [num_blocks, ...] | values of layer 0 | ...

    The master says which WorkAgent writes a block when; whoever reads one finds in it whose it is.
    """

    def __init__(self, fd: int, num_blocks: int, layers: Sequence[tuple[ms.Parameter, ms.Parameter]]) -> None:
        """Maps the file behind `fd`, which stays the caller's, for blocks like those of the caches in `layers`."""
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
        """Of a block, all layers."""
        return sum(array[0].nbytes for array in self._arrays)

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]:
        """Tokens written of each of these blocks, and what they hold: as `transport.messages.Blocks` says.

        Raises:
            WorkerError: There is no such block, or it is not the one of this epoch.
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
        """The inverse of `read`, here; until it is done nobody may read these blocks.

        Raises:
            WorkerError: There is no such block, the content is that of more or fewer, or a number is none of a block.
        """
        ids = self._ids(block_ids, epochs)
        if (len(num_written), len(content)) != (len(ids), len(ids) * self.block_bytes):
            rule = f"{len(ids)} blocks must come with {len(ids) * self.block_bytes} bytes, each with its tokens"
            raise WorkerError(f"{rule}. Given: {len(content)} bytes, tokens of {len(num_written)}")
        if not all(0 < each <= MAX_TOKENS for each in num_written) or max(epochs) > _MAX_EPOCH:
            rule = f"blocks must have 1 to {MAX_TOKENS} tokens each and epochs up to {_MAX_EPOCH}"
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
            raise WorkerError(f"block {ids[int(np.flatnonzero(others)[0])]} of the transfer pool is somebody else's")


def _sizes(num_blocks: int, layers: Sequence[tuple[ms.Parameter, ms.Parameter]]) -> Iterator[int]:
    """Bytes of each array, in whole pages."""
    for cache in (each for layer in layers for each in layer):
        yield _whole_pages(num_blocks * bytes_of_block(cache))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


class Pool(Protocol):
    """As `TransferMemory`."""

    def read(self, block_ids: Sequence[int], epochs: Sequence[int]) -> tuple[list[int], bytes]: ...

    def write(
        self, block_ids: Sequence[int], epochs: Sequence[int], num_written: Sequence[int], content: bytes
    ) -> None: ...


def exchange_blocks(
    channel: Channel[MasterMessage],
    pool: Pool,
    rest: Callable[[float], None] = lambda took_s: None,
    clock: Clock = time.thread_time,
) -> None:
    """Does what the master asks for, beside the steps: in a thread of its own, until the connection ends.

    Args:
        channel: To the master.
        pool: With the blocks.
        rest: Gives way to the steps; is told how much of a core's time a frame took.
        clock: Of this thread's own time.

    Raises:
        TransportError: It has ended, or the master says something else.
    """
    began = clock()
    while True:
        channel.send(_answer(channel.receive(), pool))
        ended = clock()
        rest(ended - began)
        began = ended


def _answer(message: MasterMessage, pool: Pool) -> Blocks | BlocksTaken | BlocksRefused:
    try:
        if isinstance(message, SendBlocks):
            return Blocks(message.block_ids, message.epochs, *pool.read(message.block_ids, message.epochs))
        if isinstance(message, Blocks):
            pool.write(message.block_ids, message.epochs, message.num_written, message.content)
            return BlocksTaken(message.block_ids, message.epochs)
    except WorkerError as error:
        return BlocksRefused(str(error))
    raise ProtocolError(f"expected blocks, got {str(message)[:100]}")


SHARE: Final = 0.1
"""Of one core's time, at most, while steps are computed."""


class BesideSteps:
    """Between the thread of the steps and another one, which works in small pieces and rests after each.

    Args:
        pause: Waits so many seconds.
    """

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._num_begun = self._num_seen = 0
        self._is_running = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step is computed meanwhile."""
        self._num_begun += 1
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def rest(self, took_s: float) -> None:
        """Waits until a piece that took so much of a core's time is `SHARE` of the time gone by; not at all if no step
        was computed since the piece before."""
        num_begun = self._num_begun
        if self._is_running or num_begun > self._num_seen:
            self._pause(took_s * (1 / SHARE - 1))
        self._num_seen = num_begun
