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
_DTYPES = {"<i4": 4, "<f4": 4, "<u8": 8}
"""With the bytes of an element."""

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
        start = offset = self._start(buffer)
        layout: list[ArrayLayout] = []
        for array in arrays:
            dtype, end = array.dtype.str, offset + array.nbytes
            self._check(dtype, array.shape, end - start)
            self._memory[offset:end] = array.tobytes()
            layout.append(ArrayLayout(dtype, array.shape))
            offset = _aligned(end)
        return tuple(layout)

    def read(self, buffer: int, layout: Sequence[ArrayLayout]) -> list[AnyArray]:
        """Views of the arrays of a buffer, valid until its owner writes it again.

        Raises:
            ProtocolError: The layout names another dtype or leaves the buffer.
        """
        start = offset = self._start(buffer)
        views: list[AnyArray] = []
        for array in layout:
            count = math.prod(array.shape)
            end = offset + count * _DTYPES.get(array.dtype, 0)
            self._check(array.dtype, array.shape, end - start)
            views.append(np.frombuffer(self._memory, array.dtype, count, offset).reshape(array.shape))
            offset = _aligned(end)
        return views

    def _start(self, buffer: int) -> int:
        if not 0 <= buffer < self.num_buffers:
            raise ProtocolError(f"buffer {buffer} does not exist; there are {self.num_buffers}")
        return buffer * self.buffer_bytes

    def _check(self, dtype: str, shape: Sequence[int], num_bytes: int) -> None:
        """Raises ProtocolError unless such an array can be the next one and end `num_bytes` into the buffer."""
        if dtype not in _DTYPES or min(shape, default=0) < 0:
            raise ProtocolError(f"an array of {dtype} {tuple(shape)} cannot be in a buffer")
        if num_bytes > self.buffer_bytes:
            raise ProtocolError(f"the arrays of a step exceed the buffer of {self.buffer_bytes} bytes")

    def close(self) -> None:
        """Unmaps the file here; the other side's mapping lives on. Views that still exist keep the memory."""
        try:
            self._memory.close()
        except BufferError:  # a view is still alive: the mapping goes with it
            del self._memory


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
