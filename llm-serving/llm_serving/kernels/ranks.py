"""Tensor parallelism within one machine: the processes that compute a model together, and their collectives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import RankLostError
from llm_serving.kernels import library

Array = NDArray[Any]

JOIN_S: Final = 3600.0
"""Seconds in which all ranks must join and load their weights."""


class Ranks:
    """One of several processes (ranks) that compute the same step at the same time. Methods raise RankLostError if
    another rank has ended or computes a different step. After an error, do not use the object again: partial sums of
    two different steps could be added.
    """

    def __init__(self, fd: int, rank: int, count: int, timeout_s: float = JOIN_S) -> None:
        """Join the other ranks and wait for them. `fd` refers to shared memory that all ranks have inherited."""
        self.rank, self.count = rank, count
        self._library = library.load()
        self._handle = self._library.llm_join_ranks(fd, rank, count, timeout_s)
        self._leave = weakref.finalize(self, self._library.llm_leave_ranks, self._handle)
        self.check()

    @property
    def error(self) -> str | None:
        error: bytes | None = self._library.llm_error_of_ranks(self._handle)
        return None if error is None else error.decode(errors="replace")

    def check(self) -> None:
        if (error := self.error) is not None:
            raise RankLostError(error)

    def use(self) -> None:
        """Compute the next steps of this process (`lowering.program`) together with the other ranks."""
        self._library.llm_use_ranks(self._handle)

    def start_step(self, step: int, timeout_s: float) -> None:
        """Start a step, whose number must be the same on all ranks. Wait at most `timeout_s` for another rank."""
        self._library.llm_begin_step(self._handle, step, timeout_s)

    def all_reduce(self, x: Array, dtype: str) -> Array:
        """Return the sum of x over all ranks. bfloat16 and float16 elements are given as their bits."""
        x = np.ascontiguousarray(x)
        y = np.empty_like(x)
        self._library.llm_all_reduce(self._handle, x.ctypes.data, y.ctypes.data, x.size, dtype.encode())
        self.check()
        return y

    def all_gather(self, rows: NDArray[np.float32], width: int) -> NDArray[np.float32]:
        """Return the columns of all ranks in rank order, [S, width]. `rows`: this rank's columns, [S, columns]."""
        whole = np.zeros((len(rows), width), np.float32)
        first = self.rank * width // self.count
        whole[:, first : first + rows.shape[1]] = rows
        self._library.llm_all_gather(self._handle, whole.ctypes.data, len(whole), width)
        self.check()
        return whole

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Send integers to the other ranks, which must send equally many. Return all integers in rank order."""
        mine = np.array(numbers, np.int64)
        every = np.empty((self.count, len(mine)), np.int64)
        self._library.llm_exchange(self._handle, mine.ctypes.data, mine.nbytes, every.ctypes.data)
        self.check()
        return every.tolist()  # type: ignore[no-any-return]

    def leave(self) -> None:
        self._leave()
