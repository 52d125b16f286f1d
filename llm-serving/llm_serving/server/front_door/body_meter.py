"""How much of a request's body has come, and how much beside it."""

from __future__ import annotations

from typing import Final

BODY_PER_FRAMING: Final = 4
"""Bytes of a chunked body for each byte of framing beyond the limit: tiny chunks cost much time."""


class BodyMeter:
    """Counts the bytes of one body after the other."""

    def __init__(self) -> None:
        self.left: int | None = None
        """Bytes of a body of declared length that have not come; None: it is chunked."""
        self.num_bytes = 0
        """Of the body, so far."""
        self._most_held: int | None = None
        self._gap_bytes = 0
        """Since the last one of the body."""
        self._framing_bytes = 0

    def begin(self) -> None:
        """A head is complete."""
        self.num_bytes = self._gap_bytes = self._framing_bytes = 0
        self._most_held = None

    def hold_at_most(self, num_bytes: int) -> None:
        """Whoever reads this body puts what exceeds so many bytes elsewhere than in memory."""
        self._most_held = num_bytes

    @property
    def num_held(self) -> int:
        """Bytes of the body that are in memory, as long as all of it is needed."""
        return self.num_bytes if self._most_held is None else min(self.num_bytes, self._most_held)

    def arrived(self, size: int) -> None:
        """So many bytes have come, of whatever kind."""
        self._gap_bytes += size
        self._framing_bytes += size

    def were_body(self, size: int) -> None:
        """So many of them were body."""
        self.num_bytes += size
        self._framing_bytes -= size
        self._gap_bytes = 0

    @property
    def framing(self) -> int:
        """Bytes since the last one of the body, or of all that is not body, less what goes with it."""
        return max(self._gap_bytes, self._framing_bytes - self.num_bytes // BODY_PER_FRAMING)
