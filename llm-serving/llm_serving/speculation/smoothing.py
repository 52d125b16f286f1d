"""The mean of what was measured, of late."""

from __future__ import annotations

from typing import Final

MOST: Final = 4
"""Times the mean that one measurement counts at most: a thread that is put off in the middle says little."""


def smoothed(mean: float, seconds: float, memory: int) -> float:
    """The mean, where one measurement more took `seconds`; that counts 1/e after `memory` others.

    Before the first the mean is 0.
    """
    return mean + (min(seconds, MOST * mean) - mean) / memory if mean else seconds
