"""The transfer pool: memory by which WorkAgents hand blocks of the key/value cache over."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence

import mindspore as ms
import numpy as np

from llm_serving.backends.base import Array
from llm_serving.backends.parameters import bytes_of_block, storage_dtype
from llm_serving.core.step import Int32Array
from llm_serving.errors import WorkerError
from llm_serving.transport.block_frames import MAX_TOKENS

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
