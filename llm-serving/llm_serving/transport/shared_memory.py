"""NumPy arrays in memory that master and WorkAgent both see.

NumPy arrays inside a frame, for a WorkAgent that shares no memory with the master.

The memory in which processes of one machine add up what each computes of a replica.

The memory by which WorkAgents hand blocks of the key/value cache over: those of one machine share it.

How many blocks of a transfer pool one frame takes, and how many frames are under way.
"""

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

AnyArray = NDArray[Any]


class Written(NamedTuple):
    """What the frame of a step tells of its arrays.

    Attributes:
        layout: Needed to read them.
        content: The arrays themselves, unless they lie in memory that both sides see.
    """

    layout: tuple[ArrayLayout, ...]
    content: bytes = b""


def layout_of(arrays: Sequence[AnyArray]) -> tuple[ArrayLayout, ...]:
    """How the arrays of a step are told of.

    Raises:
        ProtocolError: One has a type that none of a step has.
    """
    dtypes = [_NAMES.get(array.dtype) for array in arrays]
    if None in dtypes:
        raise ProtocolError(f"an array of {arrays[dtypes.index(None)].dtype.str} cannot be in a step")
    return tuple([ArrayLayout(name, array.shape) for name, array in zip(dtypes, arrays, strict=True) if name])


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
        self._owns_fd = False
        self.num_buffers = num_buffers
        self.buffer_bytes = _aligned(buffer_bytes)
        self._memory = mmap.mmap(fd, num_buffers * self.buffer_bytes)

    @classmethod
    def create(cls, num_buffers: int, buffer_bytes: int) -> SharedBuffers:
        """A new file, which `close` gives up."""
        fd = os.memfd_create("llm_serving_steps", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_buffers * _aligned(buffer_bytes))
            buffers = cls(fd, num_buffers, buffer_bytes)
        except OSError:
            os.close(fd)
            raise
        buffers._owns_fd = True
        return buffers

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: Sequence[ArrayLayout] = ()) -> Written:
        """Copies the arrays into a buffer, one behind the other; the result is what `read` needs.

        Args:
            buffer: Its index.
            arrays: What to copy.
            behind: Layout of arrays of the same buffer that stay as they are.

        Raises:
            ProtocolError: They do not fit.
        """
        start = self._start(buffer)
        offset = _length_of(behind)
        layout = layout_of(arrays)
        content = b"".join(
            [
                part
                for array in arrays
                if (size := array.nbytes)
                for part in (array.tobytes(), _PADDING[-size % _ALIGNMENT])
            ]
        )
        if offset + len(content) > self.buffer_bytes:
            raise ProtocolError(_too_long(self.buffer_bytes))
        self._memory[start + offset : start + offset + len(content)] = content
        return Written(layout)

    def read(
        self, buffer: int, layout: Sequence[ArrayLayout], content: bytes = b"", behind: Sequence[ArrayLayout] = ()
    ) -> list[AnyArray]:
        """Views of the arrays of a buffer, valid until its owner writes it again; those `behind` others, as in `write`.

        Raises:
            ProtocolError: The layout names another dtype or leaves the buffer, or the frame has arrays of its own.
        """
        if content:
            raise ProtocolError("the arrays of a step were announced in memory and came in the frame")
        start = self._start(buffer)
        offset, end = start + _length_of(behind), start + self.buffer_bytes
        views: list[AnyArray] = []
        for array in layout:
            view = self._view(array, offset)
            offset += view.nbytes + -view.nbytes % _ALIGNMENT
            if offset > end:
                raise ProtocolError(_too_long(self.buffer_bytes))
            views.append(view)
        return views

    def _view(self, array: ArrayLayout, offset: int) -> AnyArray:
        try:
            if (dtype := DTYPES.get(array.dtype)) is not None:
                return np.ndarray(array.shape, dtype, self._memory, offset)
        except TypeError:
            raise ProtocolError(_too_long(self.buffer_bytes)) from None
        except ValueError:  # a length below 0, or beyond what an array may have
            pass
        raise ProtocolError(f"an array of {array.dtype} {array.shape} cannot be in a buffer")

    def _start(self, buffer: int) -> int:
        if not 0 <= buffer < self.num_buffers:
            raise ProtocolError(f"buffer {buffer} does not exist; there are {self.num_buffers}")
        return buffer * self.buffer_bytes

    def close(self) -> None:
        """Unmaps the file here; the other side's mapping lives on. Views that still exist keep the memory."""
        try:
            self._memory.close()
        except BufferError:  # a view is still alive: the mapping goes with it
            del self._memory
        if self._owns_fd:
            self._owns_fd = False
            os.close(self.fd)


def _length_of(layout: Sequence[ArrayLayout]) -> int:
    return sum([_aligned(math.prod(array.shape) * DTYPES[array.dtype].itemsize) for array in layout])


def _too_long(buffer_bytes: int) -> str:
    return f"the arrays of a step exceed the buffer of {buffer_bytes} bytes"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class InlineArrays:
    """Has the face of `SharedBuffers`: what that writes to memory travels in the frame, one array behind the other.

    Args:
        num_buffers: Steps that may be in flight.
    """

    def __init__(self, num_buffers: int) -> None:
        self.num_buffers = num_buffers

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: Sequence[ArrayLayout] = ()) -> Written:
        return Written(layout_of(arrays), b"".join([array.tobytes() for array in arrays]))

    def read(
        self, buffer: int, layout: Sequence[ArrayLayout], content: bytes, behind: Sequence[ArrayLayout] = ()
    ) -> list[AnyArray]:
        """Read-only views of the content.

        Raises:
            ProtocolError: The layout names another dtype or does not fit the content.
        """
        views: list[AnyArray] = []
        offset = 0
        for array in layout:
            try:
                view: AnyArray = np.ndarray(array.shape, DTYPES[array.dtype], content, offset)
            except (KeyError, TypeError, ValueError):  # a length below 0, or more than there is
                raise ProtocolError(f"an array of {array.dtype} {array.shape} is not in the frame") from None
            offset += view.nbytes
            views.append(view)
        if offset != len(content):
            raise ProtocolError(f"the arrays of a step take {offset} bytes; {len(content)} arrived")
        return views

    def close(self) -> None:
        """There is nothing to give back."""


SEATS_BYTES: Final = 4096
PIECE_BYTES: Final = 2**20
"""As kSeatsBytes and kPieceBytes of kernels/csrc/ranks.h."""


@contextmanager
def rank_memory(num_ranks: int) -> Iterator[int]:
    """The descriptor of a new file without a name, to be inherited; whoever has inherited it keeps it."""
    fd = os.memfd_create("llm_serving_ranks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, SEATS_BYTES + 2 * num_ranks * PIECE_BYTES)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def transfer_memory() -> Iterator[int]:
    """The descriptor of a new empty file without a name, to be inherited; who has inherited it says how long it is."""
    fd = os.memfd_create("llm_serving_transfer", os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


FRAMES_UNDER_WAY: Final = 2
"""On each connection, before the first of them is answered: while one is on its way the next one is too."""
MAX_BLOCKS: Final = 256
MAX_TOKENS: Final = 2**16
"""Written of one block; far more than any has."""
_NAMES_BYTES: Final = 2**14
"""Room for the numbers of so many blocks."""


def blocks_a_frame(block_bytes: int) -> int:
    """At least one, however large it is."""
    return min(max(1, PIECE_BYTES // max(block_bytes, 1)), MAX_BLOCKS)


def max_frame_bytes(block_bytes: int) -> int:
    """Longest frame by which blocks travel."""
    return blocks_a_frame(block_bytes) * block_bytes + _NAMES_BYTES
