"""How much of this machine other programs take while something is measured."""

from __future__ import annotations

import contextlib
import time
from typing import Final

import psutil

MOST: Final = 0.1
"""Share of all processors, beyond which a measurement is of something else."""


class Disturbance:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._all_s, self._own_s = _all_s(), _own_s()

    def share(self) -> float:
        """Of all processors, that neither this process nor its descendants have taken since."""
        elapsed = (time.monotonic() - self._began_s) * (psutil.cpu_count() or 1)
        others = _all_s() - self._all_s - max(0.0, _own_s() - self._own_s)
        return max(0.0, others / elapsed) if elapsed > 0 else 0.0


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_s() -> float:
    total = 0.0
    this = psutil.Process()
    for each in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            total += times.user + times.system
    return total
