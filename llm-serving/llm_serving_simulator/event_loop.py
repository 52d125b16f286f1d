"""How long the event loop takes for a request and for a token, by what clients saw.

The loop does one thing after the other: a request that is read, a token that is sent. With three numbers (`LoopCosts`)
everything that came to it in a measurement can be played again; those are looked for with which that comes closest to
when requests were at the door and tokens at their clients, whether the loop had time or not.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from llm_serving_simulator.http_player import Seen
from llm_serving_simulator.measured_steps import MeasuredStep, Timings

FLOOR_S: Final = 0.0002
"""Delays are compared as ratios; this is added to both."""
ROUNDS: Final = 5
FACTORS: Final = (0.4, 0.6, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.6, 2.5)
"""By which each number is varied in turn."""


class LoopCosts(NamedTuple):
    """Seconds; see `Profile`."""

    request_s: float
    token_s: float
    client_s: float


class _Event(NamedTuple):
    """What came to the loop."""

    time_s: float
    num_tokens: int
    """0: a request."""
    seen_s: float
    """When it was done: the request at the door, the middle one of the tokens at its client."""


def fit_loop(
    timings: Timings, seen: Sequence[Seen], take_s: Callable[[MeasuredStep], float], first: LoopCosts
) -> LoopCosts | None:
    """The numbers that come closest; None: clients saw nothing.

    Args:
        timings: Of the scheduler.
        seen: Of the clients.
        take_s: From the reply of a step until its tokens come to the loop.
        first: Where the search begins.
    """
    events = sorted(_events(timings, seen, take_s))
    if not events:
        return None
    best, least = first, _distance(events, first)
    for _ in range(ROUNDS):
        before = best
        for name in LoopCosts._fields:
            for factor in FACTORS:
                trial = best._replace(**{name: factor * getattr(before, name)})
                distance = _distance(events, trial)
                if distance < least:
                    best, least = trial, distance
    return best


def _events(timings: Timings, seen: Sequence[Seen], take_s: Callable[[MeasuredStep], float]) -> list[_Event]:
    names = {name.rpartition("-")[0]: name for name in timings.arrivals}
    arrived: dict[float, list[float]] = defaultdict(list)
    events = []
    for each in seen:
        name = names.get(each.request_id)
        if name is None:
            continue
        events.append(_Event(each.due_s, 0, timings.arrivals[name]))
        for reply, time in zip(timings.replies.get(name, []), each.token_times_s, strict=False):
            arrived[reply].append(time)
    sent = ((step, sorted(arrived[step.replied_s])) for step in timings.steps if step.replied_s in arrived)
    events += [_Event(step.replied_s + take_s(step), len(times), times[len(times) // 2]) for step, times in sent]
    return events


def _distance(events: Sequence[_Event], costs: LoopCosts) -> float:
    """Mean of the logarithms of ratios of delays, requests and tokens weighing alike."""
    request_s, token_s, client_s = costs
    free = -math.inf
    sums, counts = [0.0, 0.0], [0, 0]
    for time, count, done in events:
        if count:
            begins = max(free, time)
            free = begins + count * token_s
            told = begins + (count // 2 + 1) * token_s + client_s
        else:
            free = told = max(free, time + client_s) + request_s
        kind = count > 0
        sums[kind] += abs(math.log((told - time + FLOOR_S) / (max(0.0, done - time) + FLOOR_S)))
        counts[kind] += 1
    return sum(total / max(1, count) for total, count in zip(sums, counts, strict=True))
