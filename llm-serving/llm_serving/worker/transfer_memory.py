"""The transfer pool: memory of this machine by which WorkAgents hand blocks of the key/value cache over."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence

import mindspore as ms
import numpy as np

from llm_serving.backends.base import Array
from llm_serving.core.step import Int32Array

_PAGE = 4096


class TransferMemory:
    """A file without a name that the master made and every WorkAgent of the machine has inherited.

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
            elements = np.frombuffer(memory, cache.storage.dtype, math.prod(shape), offset)
            arrays.append(elements.reshape(shape))
            offset += size
        self.layers: tuple[tuple[Array, Array], ...] = tuple(zip(arrays[::2], arrays[1::2], strict=True))


def _sizes(num_blocks: int, layers: Sequence[tuple[ms.Parameter, ms.Parameter]]) -> Iterator[int]:
    """Bytes of each array, in whole pages."""
    for cache in (each for layer in layers for each in layer):
        yield _whole_pages(num_blocks * math.prod(cache.shape[1:]) * cache.storage.dtype.itemsize)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
