"""Memory that processes share: arrays of steps, all-reduce buffers, and KV blocks in transfer between WorkAgents."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import Shapes

_ALIGNMENT: Final = 64
SHAPE: Final = attrgetter("shape")

SEATS_BYTES: Final = 4096
PIECE_BYTES: Final = 2**20
"""Bytes of a piece of the all-reduce buffers. It must equal kSeatsBytes and kPieceBytes of kernels/csrc/ranks.h."""

MAX_FRAMES_IN_FLIGHT: Final = 2
"""Maximum number of frames without a reply. While one is processed, the next one is sent."""
MAX_BLOCKS_PER_FRAME: Final = 256
MAX_TOKENS_PER_BLOCK: Final = 2**16
_NAMES_BYTES: Final = 2**14

AnyArray = NDArray[Any]


Types = Sequence[np.dtype[Any]]
"""Types of a step's arrays. Arrays of 8-byte numbers come first, so that the arrays need no padding in between."""


class StoredArrays(NamedTuple):
    """The shapes of a step's arrays. `content` holds the arrays if there is no shared memory, else a buffer does."""

    shapes: Shapes
    content: bytes = b""


class SharedBuffers:
    """Buffers of equal size in one anonymous memory file. A buffer holds one array directly after the other. The master
    creates the file, and the WorkAgent inherits its descriptor. The file has no name, so the kernel removes it when
    both processes have exited. Pages are allocated when first written, so a generous size costs nothing.
    """

    def __init__(self, fd: int, num_buffers: int, buffer_bytes: int) -> None:
        self.fd = fd
        self._owns_fd = False
        self.num_buffers = num_buffers
        self.buffer_bytes = _aligned(buffer_bytes)
        self._memory = mmap.mmap(fd, num_buffers * self.buffer_bytes)
        self._views: dict[int, tuple[tuple[object, ...], list[AnyArray]]] = {}
        """Number of a buffer -> arguments and views of its latest `read`. Most steps repeat earlier shapes."""

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

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: int = 0) -> StoredArrays:
        """Copy arrays to a buffer, behind earlier arrays of `behind` bytes. Raise ProtocolError if too long."""
        stored, start = _stored(arrays), self._start(buffer) + behind
        if behind + len(stored.content) > self.buffer_bytes:
            raise ProtocolError(_too_long(self.buffer_bytes))
        self._memory[start : start + len(stored.content)] = stored.content
        return StoredArrays(stored.shapes)

    def read(self, buffer: int, shapes: Shapes, types: Types, content: bytes = b"", behind: int = 0) -> list[AnyArray]:
        """Return views of the arrays in buffer number `buffer`, valid until the next `write`. Skip the arrays before
        them, of `behind` bytes. Raise ProtocolError if arrays exceed the buffer or `content` is not empty.
        """
        if content:
            raise ProtocolError("the arrays of a step arrived in the frame instead of shared memory")
        arguments, views = self._views.get(buffer, ((), []))
        if arguments == (shapes, types, behind):
            return views.copy()
        start = self._start(buffer)
        views, end = _views(shapes, types, self._memory, start + behind)
        if end > start + self.buffer_bytes:
            raise ProtocolError(_too_long(self.buffer_bytes))
        self._views[buffer] = (shapes, types, behind), views
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


def _stored(arrays: Sequence[AnyArray]) -> StoredArrays:
    return StoredArrays(tuple(map(SHAPE, arrays)), b"".join(map(np.ndarray.tobytes, arrays)))


def _views(shapes: Shapes, types: Types, memory: mmap.mmap | bytes, offset: int) -> tuple[list[AnyArray], int]:
    """Return views of consecutive arrays in `memory` from `offset` on, and the offset behind them. Raise ProtocolError
    for an array that `memory` cannot contain.
    """
    if len(shapes) != len(types):
        raise ProtocolError(f"a step has {len(types)} arrays; {len(shapes)} arrived")
    views: list[AnyArray] = []
    for shape, dtype in zip(shapes, types, strict=True):
        try:
            view: AnyArray = np.ndarray(shape, dtype, memory, offset)
        except (TypeError, ValueError):  # a negative length, or more bytes than `memory` has
            kind = f"{dtype.str} of shape {shape}"
            raise ProtocolError(f"memory of {len(memory)} bytes cannot contain an array of {kind}") from None
        offset += view.nbytes
        views.append(view)
    return views, offset


def num_bytes(shapes: Shapes, types: Types) -> int:
    """Return the number of bytes that arrays take, rounded up to the alignment of the arrays behind them."""
    return _aligned(sum([math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, types, strict=True)]))


def _too_long(buffer_bytes: int) -> str:
    return f"the arrays of a step exceed the buffer of {buffer_bytes} bytes"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class InlineArrays:
    """Replaces `SharedBuffers` if there is no shared memory: the arrays are sent inside the frame."""

    def __init__(self, num_buffers: int) -> None:
        self.num_buffers = num_buffers

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: int = 0) -> StoredArrays:
        return _stored(arrays)

    def read(self, buffer: int, shapes: Shapes, types: Types, content: bytes, behind: int = 0) -> list[AnyArray]:
        """Return views of `content`. Ignore `buffer` and `behind`. Raise ProtocolError for a wrong length."""
        views, end = _views(shapes, types, content, 0)
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
