"""Connections that were taken from the kernel and wait for their turn to be welcomed."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingRow(Generic[T]):
    """A row for each address; where too many wait, the longest row loses its newest.

    What one more costs does not depend on how many wait, nor from how many addresses.

    Args:
        max_waiting: In all rows together.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._rows: dict[str, deque[T]] = {}
        self._by_length: list[dict[str, None]] = [{}]
        """Addresses whose rows have so many; the last is of the longest."""

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, address: str) -> bool:
        return address in self._rows

    def add(self, address: str, newest: T) -> tuple[str, T] | None:
        """Puts one at the end of a row.

        Returns:
            Who loses the place and the address: the newcomer itself where no row is longer than its own; None: nobody.
        """
        row = self._rows.setdefault(address, deque())
        row.append(newest)
        self._move(address, len(row) - 1, len(row))
        if self._num_waiting <= self._max_waiting:
            return None
        longest = self._by_length[-1]
        loser = address if address in longest else next(iter(longest))
        return loser, self._pop(loser, -1)

    def take(self, address: str) -> T:
        """Whoever has waited longest, of an address that has some."""
        return self._pop(address, 0)

    def take_all(self) -> list[T]:
        """Nobody waits any more."""
        return [self._pop(address, 0) for address, row in list(self._rows.items()) for _ in range(len(row))]

    def _pop(self, address: str, place: int) -> T:
        row = self._rows[address]
        taken = row[place]
        del row[place]
        if not row:
            del self._rows[address]
        self._move(address, len(row) + 1, len(row))
        return taken

    def _move(self, address: str, before: int, after: int) -> None:
        """A row had so many, and has so many now."""
        self._num_waiting += after - before
        if before:
            del self._by_length[before][address]
        if after == len(self._by_length):
            self._by_length.append({})
        if after:
            self._by_length[after][address] = None
        if not self._by_length[-1] and len(self._by_length) > 1:
            self._by_length.pop()
