"""Operator parameters passed by address: the Python side of csrc/addressed.h."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_TYPES: Final = {
    np.dtype(name): number
    for number, name in enumerate(("float32", "float16", "uint16", "int32", "int64", "int8"))  # uint16: bfloat16 bits
}
_AXES: Final = ("first", "second", "third", "fourth")


class _Row(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_char_p),  # assigning bytes is several times faster than asking NumPy for an address
        ("type", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        *[(axis, ctypes.c_int64) for axis in _AXES],
    )


_WORDS: Final = ctypes.sizeof(_Row) // ctypes.sizeof(ctypes.c_int64)


class AddressTable:
    """The table that the C++ class `AddressedCall` reads, int64 [arrays, 7]. Its address never changes."""

    def __init__(self, num_parameters: int) -> None:
        table = (_Row * num_parameters)()
        self._rows = list(table)
        words = np.frombuffer(memoryview(table).cast("B"), np.int64)
        self.memory: NDArray[np.int64] = words.reshape(num_parameters, _WORDS)

    def set_copy(self, number: int, array: NDArray[Any]) -> None:
        self._set(number, array.tobytes(), array)

    def set_view(self, number: int, array: NDArray[Any]) -> None:
        """Bind a parameter to a C-contiguous array, which the caller must keep alive."""
        self._set(number, array.ctypes.data, array)

    def _set(self, number: int, address: bytes | int, array: NDArray[Any]) -> None:
        row = self._rows[number]
        row.address = address
        row.type = _TYPES[array.dtype]
        row.rank = array.ndim
        for axis, size in zip(_AXES, array.shape, strict=False):
            setattr(row, axis, size)
