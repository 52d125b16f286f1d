"""NumPy arrays in memory that master and WorkAgent both see."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import ArrayLayout

_ALIGNMENT = 64
_DTYPES = frozenset({"<i4", "<f4", "<u8"})

AnyArray = NDArray[Any]


class SharedBuffers:
    """A ring of equal buffers in one anonymous memory file.

    The file has no name: the master makes it and the WorkAgent inherits its descriptor, so nothing has to be unlinked
    and nothing is left behind, however either of them ends. Pages are taken when first written, so a generous size
    costs nothing.

        | buffer 0: array, array, ... | buffer 1: ... |        each array starts at a multiple of 64 bytes
    """

    def __init__(self, fd: int, num_buffers: int, buffer_bytes: int) -> None:
        """Maps the file behind `fd`, which stays the caller's; both sides round `buffer_bytes` up to the alignment."""
        self.fd = fd
        self.num_buffers = num_buffers
        self.buffer_bytes = _aligned(buffer_bytes)
        self._memory = mmap.mmap(fd, num_buffers * self.buffer_bytes)

    @classmethod
    def create(cls, num_buffers: int, buffer_bytes: int) -> SharedBuffers:
        """A new file; `close` and then `os.close(buffers.fd)` give it up."""
        fd = os.memfd_create("llm_serving_steps", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_buffers * _aligned(buffer_bytes))
        return cls(fd, num_buffers, buffer_bytes)

    def write(self, buffer: int, arrays: Sequence[AnyArray]) -> tuple[ArrayLayout, ...]:
        """Copies the arrays into a buffer, one behind the other; the layout is what `read` needs.

        Raises:
            ProtocolError: They do not fit.
        """
        layout = tuple(ArrayLayout(array.dtype.str, array.shape) for array in arrays)
        for array, view in zip(arrays, self.read(buffer, layout), strict=True):
            view[...] = array
        return layout

    def read(self, buffer: int, layout: Sequence[ArrayLayout]) -> list[AnyArray]:
        """Views of the arrays of a buffer, valid until its owner writes it again.

        Raises:
            ProtocolError: The layout names another dtype or leaves the buffer.
        """
        if not 0 <= buffer < self.num_buffers:
            raise ProtocolError(f"buffer {buffer} does not exist; there are {self.num_buffers}")
        views: list[AnyArray] = []
        start = offset = buffer * self.buffer_bytes
        for array in layout:
            if array.dtype not in _DTYPES or any(size < 0 for size in array.shape):
                raise ProtocolError(f"an array of {array.dtype} {array.shape} cannot be in a buffer")
            dtype = np.dtype(array.dtype)
            count = math.prod(array.shape)
            if offset + count * dtype.itemsize > start + self.buffer_bytes:
                raise ProtocolError(f"the arrays of a step exceed the buffer of {self.buffer_bytes} bytes")
            views.append(np.frombuffer(self._memory, dtype, count, offset).reshape(array.shape))
            offset = _aligned(offset + count * dtype.itemsize)
        return views

    def close(self) -> None:
        """Unmaps the file here; the other side's mapping lives on. Views that still exist keep the memory."""
        try:
            self._memory.close()
        except BufferError:  # a view is still alive: the mapping goes with it
            del self._memory


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
