"""The highest rate at which promises are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from llm_serving_simulator.figures import Figures, figures_of
from llm_serving_simulator.load import Load
from llm_serving_simulator.simulation import Result

KEPT_SHARE: Final = 0.99
"""Of its requests, that must keep the promises of their class."""
PRECISION: Final = 0.02
"""Of the rate."""
MAX_FACTOR: Final = 256.0


class Capacity(NamedTuple):
    requests_per_s: float
    """Offered; 0 where not even a sixteenth of the load's rate is kept."""
    factor: float
    """Of the load's own rate."""
    result: Result
    figures: Figures
    """At that rate."""
    is_highest: bool
    """False: it is as far as was looked, so that a load of more requests would tell more."""


def highest_rate(load: Load, simulate: Callable[[Load], Result], kept_share: float = KEPT_SHARE) -> Capacity:
    """Looks for the highest rate of a load at which nearly all requests keep their promises, by halving.

    The requests stay the same and come in less time. It takes for granted that more requests a second never keep
    promises better.

    Args:
        load: With an open loop.
        simulate: Plays a load.
        kept_share: Of the requests.
    """
    offered = offered_rate(load)

    def at(factor: float) -> tuple[Result, Figures, bool]:
        result = simulate(load.faster(factor))
        figures = figures_of(result)
        return result, figures, figures["goodput_share"] >= kept_share

    low, high = 0.0, math.inf
    best = at(1.0)
    if best[2]:
        low = 1.0
        while high == math.inf and low < MAX_FACTOR:
            known = at(2 * low)
            low, high, best = (2 * low, high, known) if known[2] else (low, 2 * low, best)
    else:
        high = 1.0
        while low == 0.0 and high > 1 / 16:
            known = at(high / 2)
            low, high, best = (high / 2, high, known) if known[2] else (0.0, high / 2, known)
    while low and high < math.inf and (high - low) > PRECISION * low:
        factor = (low * high) ** 0.5
        known = at(factor)
        low, high, best = (factor, high, known) if known[2] else (low, factor, best)
    return Capacity(offered * low, low, best[0], best[1], high < math.inf)


def offered_rate(load: Load) -> float:
    """Requests a second while requests come; nan where none come by a clock, or all at once."""
    due = [each.due_s for stream in load.streams if stream.concurrency is None for each in stream.requests]
    span_s = max(due) - min(due) if due else 0.0
    return (len(due) - 1) / span_s if span_s > 0 else math.nan
