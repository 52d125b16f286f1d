"""Processes of one machine that compute a model together: what each computes in part is added up."""

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
"""Seconds that others have to come, and to load their weights: the master ends whoever has to wait for nobody."""


class Ranks:
    """One process of several that compute the same step at the same time.

    Whatever goes wrong is the end of all: the parts of one step would be added to those of another otherwise.
    """

    def __init__(self, fd: int, rank: int, count: int, timeout_s: float = JOIN_S) -> None:
        """Waits until the others have come.

        Args:
            fd: The memory that all have inherited, of `memory_bytes(count)`.
            rank: From 0 on.
            count: Of ranks.
            timeout_s: Seconds until all must be there, and until all must have loaded.

        Raises:
            RankLostError: They do not come.
        """
        self.rank, self.count = rank, count
        self._library = library.load()
        self._handle = self._library.llm_join_ranks(fd, rank, count, timeout_s)
        self._leave = weakref.finalize(self, self._library.llm_leave_ranks, self._handle)
        self.check()

    @property
    def error(self) -> str | None:
        """What went wrong; None while nothing did."""
        error: bytes | None = self._library.llm_error_of_ranks(self._handle)
        return None if error is None else error.decode(errors="replace")

    def check(self) -> None:
        """Raises:
        RankLostError: Another rank is gone, or does something else.
        """
        if (error := self.error) is not None:
            raise RankLostError(error)

    def use(self) -> None:
        """Programs of this process compute with the others from now on."""
        self._library.llm_use_ranks(self._handle)

    def begin(self, step: int, timeout_s: float) -> None:
        """What comes next belongs to a step, as it must for all; another is waited for so many seconds."""
        self._library.llm_begin_step(self._handle, step, timeout_s)

    def all_reduce(self, x: Array, dtype: str) -> Array:
        """The sum of x over all ranks.

        Args:
            x: Elements of the type; bfloat16 and float16 as their bits.
            dtype: Of the elements.

        Raises:
            RankLostError: As `check`.
        """
        x = np.ascontiguousarray(x)
        y = np.empty_like(x)
        self._library.llm_all_reduce(self._handle, x.ctypes.data, y.ctypes.data, x.size, dtype.encode())
        self.check()
        return y

    def all_gather(self, rows: NDArray[np.float32], width: int) -> NDArray[np.float32]:
        """[S, width] of all ranks' columns, which are as many, but for one more of some.

        Args:
            rows: [S, columns of this rank]
            width: Of all ranks together.

        Raises:
            RankLostError: As `check`.
        """
        whole = np.zeros((len(rows), width), np.float32)
        first = self.rank * width // self.count
        whole[:, first : first + rows.shape[1]] = rows
        self._library.llm_all_gather(self._handle, whole.ctypes.data, len(whole), width)
        self.check()
        return whole

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank gives, in their order; all give as many numbers.

        Raises:
            RankLostError: As `check`.
        """
        mine = np.array(numbers, np.int64)
        every = np.empty((self.count, len(mine)), np.int64)
        self._library.llm_exchange(self._handle, mine.ctypes.data, mine.nbytes, every.ctypes.data)
        self.check()
        return every.tolist()  # type: ignore[no-any-return]

    def leave(self) -> None:
        """The others are told that this rank is gone."""
        self._leave()
