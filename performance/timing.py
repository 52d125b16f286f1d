"""How long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def least_seconds(run: Callable[[], object], measured_s: float) -> float:
    """The least time of a call, over at least `measured_s` seconds of calls: what disturbs only makes slower."""
    run()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < measured_s:
        before = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - before)
    return best
