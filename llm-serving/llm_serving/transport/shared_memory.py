"""Memory that processes share: arrays of steps, all-reduce buffers, and KV blocks in transfer between WorkAgents."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import ArrayLayout

_ALIGNMENT = 64
_PADDING = [bytes(count) for count in range(_ALIGNMENT)]
DTYPES = {name: np.dtype(name) for name in ("<i4", "<f4", "<u8")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

SEATS_BYTES: Final = 4096
PIECE_BYTES: Final = 2**20
"""Bytes of a piece of the all-reduce buffers. It must equal kSeatsBytes and kPieceBytes of kernels/csrc/ranks.h."""

MAX_FRAMES_IN_FLIGHT: Final = 2
"""Maximum number of frames without a reply. While one is processed, the next one is sent."""
MAX_BLOCKS_PER_FRAME: Final = 256
MAX_TOKENS_PER_BLOCK: Final = 2**16
_NAMES_BYTES: Final = 2**14

AnyArray = NDArray[Any]


class StoredArrays(NamedTuple):
    """The layout of a step's arrays. `content` holds the arrays if there is no shared memory, else a buffer does."""

    layout: tuple[ArrayLayout, ...]
    content: bytes = b""


def layout_of(arrays: Sequence[AnyArray]) -> tuple[ArrayLayout, ...]:
    layout = []
    for array in arrays:
        if (name := _NAMES.get(array.dtype)) is None:
            raise ProtocolError(f"a step cannot contain an array of {array.dtype.str}")
        layout.append(ArrayLayout(name, array.shape))
    return tuple(layout)


class SharedBuffers:
    """Buffers of equal size in one anonymous memory file. Each array starts at a multiple of 64 bytes. The master
    creates the file, and the WorkAgent inherits its descriptor. The file has no name, so the kernel removes it when
    both processes have exited. Pages are allocated when first written, so a generous size costs nothing.
    """

    def __init__(self, fd: int, num_buffers: int, buffer_bytes: int) -> None:
        self.fd = fd
        self._owns_fd = False
        self.num_buffers = num_buffers
        self.buffer_bytes = _aligned(buffer_bytes)
        self._memory = mmap.mmap(fd, num_buffers * self.buffer_bytes)
        self._views: dict[int, tuple[tuple[Sequence[ArrayLayout], ...], list[AnyArray]]] = {}
        """Number of a buffer -> the layouts and views of its latest `read`. Most steps repeat earlier layouts."""

    @classmethod
    def create(cls, num_buffers: int, buffer_bytes: int) -> SharedBuffers:
        fd = os.memfd_create("llm_serving_steps", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_buffers * _aligned(buffer_bytes))
            buffers = cls(fd, num_buffers, buffer_bytes)
        except OSError:
            os.close(fd)
            raise
        buffers._owns_fd = True
        return buffers

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: Sequence[ArrayLayout] = ()) -> StoredArrays:
        """Copy arrays to a buffer, behind earlier arrays with the layout `behind`. Raise ProtocolError if too long."""
        start = self._start(buffer)
        offset = _length_of(behind) if behind else 0
        layout = layout_of(arrays)
        parts: list[bytes] = []
        for array in arrays:
            if size := array.nbytes:
                parts += (array.tobytes(), _PADDING[-size % _ALIGNMENT])
        content = b"".join(parts)
        if offset + len(content) > self.buffer_bytes:
            raise ProtocolError(_too_long(self.buffer_bytes))
        self._memory[start + offset : start + offset + len(content)] = content
        return StoredArrays(layout)

    def read(
        self, buffer: int, layout: Sequence[ArrayLayout], content: bytes = b"", behind: Sequence[ArrayLayout] = ()
    ) -> list[AnyArray]:
        """Return views of the arrays with `layout` in buffer number `buffer`, valid until the next `write`. Skip the
        arrays before them, with layout `behind`. Raise ProtocolError beyond the buffer's end or for any `content`.
        """
        if content:
            raise ProtocolError("the arrays of a step arrived in the frame instead of shared memory")
        layouts, views = self._views.get(buffer, ((), []))
        if layouts == (layout, behind):
            return views.copy()
        start = self._start(buffer)
        views, end = _views(layout, self._memory, start + _length_of(behind), _ALIGNMENT)
        if end > start + self.buffer_bytes:
            raise ProtocolError(_too_long(self.buffer_bytes))
        self._views[buffer] = (layout, behind), views
        return views.copy()

    def _start(self, buffer: int) -> int:
        if not 0 <= buffer < self.num_buffers:
            raise ProtocolError(f"buffer {buffer} does not exist; there are {self.num_buffers} buffers")
        return buffer * self.buffer_bytes

    def close(self) -> None:
        self._views.clear()
        try:
            self._memory.close()
        except BufferError:  # a view still exists: the mapping is released with it
            del self._memory
        if self._owns_fd:
            self._owns_fd = False
            os.close(self.fd)


def _views(
    layout: Sequence[ArrayLayout], memory: mmap.mmap | bytes, offset: int, alignment: int
) -> tuple[list[AnyArray], int]:
    """Return views of consecutive arrays in `memory` from `offset` on, and the offset behind them. Raise ProtocolError
    for an array that `memory` cannot contain.
    """
    views: list[AnyArray] = []
    for array in layout:
        try:
            view: AnyArray = np.ndarray(array.shape, DTYPES[array.dtype], memory, offset)
        except (KeyError, TypeError, ValueError):  # a negative length, or more bytes than `memory` has
            kind = f"{array.dtype} of shape {array.shape}"
            raise ProtocolError(f"memory of {len(memory)} bytes cannot contain an array of {kind}") from None
        offset += view.nbytes + -view.nbytes % alignment
        views.append(view)
    return views, offset


def _length_of(layout: Sequence[ArrayLayout]) -> int:
    return sum([_aligned(math.prod(array.shape) * DTYPES[array.dtype].itemsize) for array in layout])


def _too_long(buffer_bytes: int) -> str:
    return f"the arrays of a step exceed the buffer of {buffer_bytes} bytes"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class InlineArrays:
    """Replaces `SharedBuffers` if there is no shared memory: the arrays are sent inside the frame."""

    def __init__(self, num_buffers: int) -> None:
        self.num_buffers = num_buffers

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: Sequence[ArrayLayout] = ()) -> StoredArrays:
        return StoredArrays(layout_of(arrays), b"".join([array.tobytes() for array in arrays]))

    def read(
        self, buffer: int, layout: Sequence[ArrayLayout], content: bytes, behind: Sequence[ArrayLayout] = ()
    ) -> list[AnyArray]:
        """Return views of `content`. Ignore `buffer` and `behind`. Raise ProtocolError for a wrong length."""
        views, end = _views(layout, content, 0, 1)
        if end != len(content):
            raise ProtocolError(f"the arrays of a step must have {end} bytes. Given: {len(content)}")
        return views

    def close(self) -> None: ...


@contextmanager
def rank_memory(num_ranks: int) -> Iterator[int]:
    """Yield the descriptor of a new anonymous file, in which the ranks of a replica add their partial results."""
    fd = os.memfd_create("llm_serving_ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, SEATS_BYTES + 2 * num_ranks * PIECE_BYTES)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def transfer_memory() -> Iterator[int]:
    """Yield the descriptor of a new file in which WorkAgents exchange KV blocks. Its first user sets its size."""
    fd = os.memfd_create("llm_serving_transfer", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def blocks_per_frame(block_bytes: int) -> int:
    return min(max(1, PIECE_BYTES // max(block_bytes, 1)), MAX_BLOCKS_PER_FRAME)


def max_frame_bytes(block_bytes: int) -> int:
    return blocks_per_frame(block_bytes) * block_bytes + _NAMES_BYTES
