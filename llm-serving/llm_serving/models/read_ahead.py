"""Reading files into the system's cache before somebody maps them.

Several threads that touch the pages of a mapping have them read in small pieces in no order, slower than the disk is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_AHEAD: Final = 1 << 30
"""Bytes read before they are wanted, at most: what is far ahead may be gone again when memory is short."""

_AT_ONCE: Final = 1 << 23


@dataclass(frozen=True, slots=True)
class Extent:
    file: Path
    start: int
    num_bytes: int


class ReadAhead:
    """Reads extents one after another in a thread of its own; what cannot be read is left to who wants it."""

    def __init__(self, extents: Iterable[Extent], most_ahead: int = MOST_AHEAD) -> None:
        self._most_ahead = most_ahead
        self._num_read = 0
        self._num_taken = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(list(extents),), name="read-ahead", daemon=True)
        self._thread.start()

    @property
    def num_read(self) -> int:
        """Bytes read so far."""
        return self._num_read

    def taken(self, num_bytes: int) -> None:
        """Somebody has got to bytes, whichever: as many more may be read. Nobody waits for the thread."""
        with self._changed:
            self._num_taken += num_bytes
            self._changed.notify()

    def close(self) -> None:
        """Reads nothing further; the thread has ended when this returns."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self, extents: list[Extent]) -> None:
        buffer = memoryview(bytearray(_AT_ONCE))
        for extent in extents:
            with contextlib.suppress(OSError), extent.file.open("rb", buffering=0) as stream:
                for start in range(0, extent.num_bytes, _AT_ONCE):
                    if not self._may_read():
                        return
                    count = min(_AT_ONCE, extent.num_bytes - start)
                    os.preadv(stream.fileno(), [buffer[:count]], extent.start + start)
                    self._num_read += count

    def _may_read(self) -> bool:
        """Waits while it is too far ahead."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_read < self._num_taken + self._most_ahead)
            return not self._closed
