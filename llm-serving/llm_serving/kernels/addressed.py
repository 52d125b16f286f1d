"""Parameters that an operator is given by address: csrc/addressed.h, from Python's side."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_TYPES: Final = ("float32", "float16", "bfloat16", "int32", "int64")
_WORDS: Final = 6


class _Row(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        ("address", ctypes.c_char_p),  # of bytes it takes the address several times faster than NumPy tells that of its
        ("type", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    )


class AddressTable:
    """What `AddressedCall` reads.

    Args:
        places: Of each parameter its number in the call and the type of its elements.

    Attributes:
        memory: int64 [parameters, 6], to be given to the operator; it stays where it is.
    """

    def __init__(self, places: Sequence[tuple[int, str]]) -> None:
        table = (_Row * len(places))()
        self._rows = list(table)
        for row, (number, dtype) in zip(self._rows, places, strict=True):
            row.number, row.type = number, _TYPES.index(dtype)
        words = np.frombuffer(memoryview(table).cast("B"), np.int64)
        self.memory: NDArray[np.int64] = words.reshape(len(places), _WORDS)

    def give(self, index: int, array: NDArray[Any]) -> None:
        """Has the parameter read from a copy of an array [n] or [n, m]."""
        self._set(self._rows[index], array.tobytes(), array.shape)

    def take(self, index: int, array: NDArray[Any]) -> None:
        """Has the parameter written to an array [n] or [n, m], C-contiguous, which the caller keeps."""
        self._set(self._rows[index], array.ctypes.data, array.shape)

    @staticmethod
    def _set(row: _Row, address: bytes | int, shape: tuple[int, ...]) -> None:
        row.address = address
        row.rank = len(shape)
        row.rows, row.columns = shape if len(shape) == 2 else (*shape, 0)
