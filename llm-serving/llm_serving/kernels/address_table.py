"""Operator parameters passed by address: the Python side of csrc/addressed.h."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_TYPES: Final = {
    np.dtype(name): number
    for number, name in enumerate(("float32", "float16", "uint16", "int32", "int64", "int8"))  # uint16: of bfloat16
}
_AXES: Final = ("first", "second", "third", "fourth")


class _Row(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_char_p),  # of bytes it takes the address several times faster than NumPy tells that of its
        ("type", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        *[(axis, ctypes.c_int64) for axis in _AXES],
    )


_WORDS: Final = ctypes.sizeof(_Row) // ctypes.sizeof(ctypes.c_int64)


class AddressTable:
    """What `AddressedCall` reads: a row for each parameter, each an array of four dimensions at most.

    Attributes:
        memory: int64 [parameters, 7], to be given to the operator; it stays where it is.
    """

    def __init__(self, num_parameters: int) -> None:
        table = (_Row * num_parameters)()
        self._rows = list(table)
        words = np.frombuffer(memoryview(table).cast("B"), np.int64)
        self.memory: NDArray[np.int64] = words.reshape(num_parameters, _WORDS)

    def give(self, number: int, array: NDArray[Any]) -> None:
        """Has the parameter read from a copy of an array."""
        self._set(number, array.tobytes(), array)

    def lend(self, number: int, array: NDArray[Any]) -> None:
        """Has the parameter be an array itself, C-contiguous, which the caller keeps."""
        self._set(number, array.ctypes.data, array)

    def _set(self, number: int, address: bytes | int, array: NDArray[Any]) -> None:
        row = self._rows[number]
        row.address = address
        row.type = _TYPES[array.dtype]
        row.rank = array.ndim
        for axis, size in zip(_AXES, array.shape, strict=False):
            setattr(row, axis, size)
