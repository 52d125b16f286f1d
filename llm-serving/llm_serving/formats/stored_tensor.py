"""A tensor stored in a file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.dtypes import MODEL_DTYPES, from_bfloat16
from llm_serving.errors import ModelError, shorten

Array = NDArray[Any]

NUMPY_DTYPES: Final[Mapping[str, type[np.generic]]] = {each.safetensors: each.numpy for each in MODEL_DTYPES.values()}

PACKED_DTYPES: Final[Mapping[str, type[np.generic]]] = {
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
    "F8_E4M3": np.uint8,
}
"""dtype in a file -> NumPy type, for dtypes that only quantized weights have. `F8_E4M3` is read as uint8 bits."""

_ALL_DTYPES: Final = {**NUMPY_DTYPES, **PACKED_DTYPES}

_NOT_FINITE: Final[Mapping[str, tuple[type[np.unsignedinteger[Any]], int]]] = {
    "uint16": (np.uint16, 0x7F80 << 1),
    "float16": (np.uint16, 0x7C00 << 1),
    "float32": (np.uint32, 0x7F800000 << 1),
}
"""Array type -> (integer type of the same width, bits of infinity shifted left by one, without the sign bit)."""
_AT_ONCE: Final = 2**18


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The location of a tensor's elements in a file. `dtype` is a key of `NUMPY_DTYPES` or `PACKED_DTYPES`. Each of
    `pieces` is (first byte, number of bytes). The pieces are in order and have `num_bytes` bytes in all.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return (self,)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(_ALL_DTYPES[self.dtype]).itemsize

    def part(self, start: int, shape: tuple[int, ...]) -> StoredTensor:
        """Return a tensor of shape `shape` that begins at element `start` of this one, which must have one piece."""
        ((at, _),) = self.pieces
        item = np.dtype(_ALL_DTYPES[self.dtype]).itemsize
        return StoredTensor(self.file, self.dtype, shape, ((at + start * item, math.prod(shape) * item),))

    def read(self) -> Array:
        """Return a read-only memory map, or a copy if the elements are in several pieces or misaligned."""
        dtype = np.dtype(_ALL_DTYPES[self.dtype])
        if not math.prod(self.shape):
            return np.empty(self.shape, dtype)
        (start, _), *more = self.pieces
        if not more and start % dtype.itemsize == 0:
            return np.memmap(self.file, dtype, mode="r", offset=start, shape=self.shape)
        whole = np.empty(self.num_bytes, np.uint8)
        done = 0
        for start, num_bytes in self.pieces:
            whole[done : done + num_bytes] = np.memmap(self.file, np.uint8, mode="r", offset=start, shape=(num_bytes,))
            done += num_bytes
        array: Array = whole.view(dtype).reshape(self.shape)
        array.flags.writeable = False
        return array


def check_apart(file: Path, tensors: Iterable[tuple[str, StoredTensor]]) -> None:
    places = sorted((*piece, name) for name, each in tensors for piece in each.pieces if piece[1])
    for (start, num_bytes, name), (next_start, _, next_name) in itertools.pairwise(places):
        if next_start < start + num_bytes:
            raise ModelError(f"{file}: tensors {shorten(name)} and {shorten(next_name)} must not share bytes")


def to_float32(array: Array) -> NDArray[np.float32]:
    """Convert stored elements exactly. A bfloat16 is the upper half of the float32 of the same value."""
    return from_bfloat16(array) if array.dtype == np.uint16 else array.astype(np.float32)


def is_finite(array: Array) -> bool:
    words, least = _NOT_FINITE[array.dtype.name]
    elements = array.reshape(-1).view(words)
    without_sign = np.empty(min(_AT_ONCE, elements.size), words)
    for start in range(0, elements.size, _AT_ONCE):
        part = elements[start : start + _AT_ONCE]
        if int(np.left_shift(part, 1, out=without_sign[: part.size]).max()) >= least:
            return False
    return True
