"""The least and the most of what a number has been since a moment."""

from __future__ import annotations

from bisect import bisect_left


class Extremes:
    """Values at moments that are counted; `since` takes as long however many moments there are between.

    Kept are those values alone that are below, or above, all that came after them: few, as what goes up comes down.
    """

    def __init__(self) -> None:
        self._low_moments: list[int] = []
        self._lows: list[int] = []
        """Both ascending."""
        self._high_moments: list[int] = []
        self._highs: list[int] = []
        """Moments ascending, values descending."""

    def add(self, moment: int, value: int) -> None:
        """It has this value from a moment on, the latest of all."""
        lows, highs = self._lows, self._highs
        if lows and lows[-1] == value:  # the latest is the last of both
            self._low_moments[-1] = self._high_moments[-1] = moment
            return
        while lows and lows[-1] >= value:
            del self._low_moments[-1], lows[-1]
        while highs and highs[-1] <= value:
            del self._high_moments[-1], highs[-1]
        self._low_moments.append(moment)
        self._high_moments.append(moment)
        lows.append(value)
        highs.append(value)

    def since(self, moment: int) -> tuple[int, int]:
        """The least and the most since a moment at which a value was added."""
        least = self._lows[bisect_left(self._low_moments, moment)]
        return least, self._highs[bisect_left(self._high_moments, moment)]
