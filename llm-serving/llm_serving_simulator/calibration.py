"""Calibration: a profile from the steps of recordings and from what clients measured of the same requests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from llm_serving.errors import RecordingError

from llm_serving_simulator.fitting import MASTER_TERMS, Fit, fit, fit_steps, usable_steps
from llm_serving_simulator.http_player import ClientTiming
from llm_serving_simulator.profile import DEFAULT_LEAD_S, IDLE_AFTER_S, Profile, measured_maxima
from llm_serving_simulator.recordings import LONG_STEP_S, MeasuredStep, Timings

MIN_STEPS: Final = 50
MIN_LEADS: Final = 10
"""Minimum number of announced long steps for a measurement of `lead_s`."""

INTERVAL_S: Final = 0.5
SLOW_FACTOR: Final = 1.2
"""Ratio to the median interval above which an interval is slow."""
MIN_STEPS_PER_INTERVAL: Final = 4
NUM_ITERATIONS: Final = 5

FLOOR_S: Final = 0.0002
"""Seconds that are added to both delays before their ratio is computed."""
FACTORS: Final = (0.4, 0.6, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.6, 2.5)
"""Factors by which the search varies each cost of the event loop."""


class Calibration(NamedTuple):
    """A profile with the fits that it was made from."""

    profile: Profile
    step: Fit
    take: Fit


def calibrate(
    timings: Timings,
    phases: Sequence[Sequence[ClientTiming]] = (),
    *,
    name: str,
    source: str,
    notes: dict[str, Any] | None = None,
    seed: int = 1,
) -> Calibration:
    """Fit every value of a profile that was measured; other values are 0.

    A step that was scheduled ahead lasts from the reply before it to its own reply. Another step starts with its
    scheduling, which is fitted as a model of its own. Tokens sent and requests read while the step runs are terms of
    the step's model. Intervals in which other programs slowed the machine are corrected.

    Args:
        timings: Times of the scheduler.
        phases: What clients measured; steps outside of these phases are left out. Without phases the event loop costs
            nothing.
        name: Name of the profile.
        source: Where its figures come from.
        notes: Free text for people; errors and counts are added.
        seed: Selects the held-out steps.

    Raises:
        RecordingError: There are too few steps.
    """
    timings, clients = _within(timings, phases), [each for phase in phases for each in phase]
    steps = [each for each in timings.steps if each.previous_reply_s > float("-inf")]
    if len(steps) < MIN_STEPS:
        raise RecordingError(f"a profile needs at least {MIN_STEPS} steps. Given: {len(steps)}")
    usable = usable_steps(steps)
    slow = find_slow_intervals(usable)
    step = fit_steps(usable, [each.seconds / slow.factor(each.reply_s) for each in usable], seed)
    processed = [each for each in steps if each.next_schedule_s is not None]
    take = fit([each.shape for each in processed], [_take_s(each) for each in processed], MASTER_TERMS, seed)

    def take_s(step: MeasuredStep) -> float:
        return take.model.seconds(step.shape) if step.next_schedule_s is None else _take_s(step)

    loop = fit_event_loop(timings, clients, take_s) or EventLoopCosts(0.0, 0.0, 0.0)
    delays = [each.scheduled_s - each.arrival_s for each in steps if not each.ahead and each.arrival_s is not None]
    profile = Profile(
        name=name,
        source=source,
        measured=True,
        step=step.model,
        form=step.conditional,
        take=take.model,
        wake_s=_median(delays),
        lead_s=_lead_s(steps),
        request_s=float(f"{loop.request_s:.3g}"),
        token_s=float(f"{loop.token_s:.3g}"),
        client_s=float(f"{loop.client_s:.3g}"),
        spread=step.spread,
        num_blocks=timings.num_blocks,
        block_size=timings.block_size,
        measured_to=measured_maxima([each.shape for each in usable]),
        notes={**(notes or {}), **_error_notes(step, take), "disturbed": round(slow.mean - 1, 3)},
    )
    idle = [each for each in steps if _follows_idleness(each) and slow.factor(each.reply_s) == 1.0]
    return Calibration(replace(profile, idle_s=_idle_s(idle, timings, clients, profile)), step, take)


def _follows_idleness(step: MeasuredStep) -> bool:
    return step.arrival_s is not None and step.arrival_s - step.previous_reply_s > IDLE_AFTER_S


def _idle_s(
    steps: Sequence[MeasuredStep], timings: Timings, clients: Sequence[ClientTiming], profile: Profile
) -> float:
    """Return how much longer than predicted the first token of an idle server takes to its client, or without client
    timings to the reply.
    """
    predicted = [profile.form.seconds(each.shape) + profile.step.seconds(each.shape) for each in steps]
    if not clients:
        return _median([each.seconds - known for each, known in zip(steps, predicted, strict=True)])
    names = {time: name.rpartition("-")[0] for name, time in timings.arrivals.items()}
    ttft_s = {each.request_id: each.token_times_s[0] - each.due_s for each in clients if each.token_times_s}
    overhead_s = profile.request_s + profile.wake_s + profile.token_s + 2 * profile.client_s
    return _median(
        [
            ttft_s[name] - overhead_s - known - profile.take.seconds(each.shape)
            for each, known in zip(steps, predicted, strict=True)
            if each.arrival_s is not None and (name := names.get(each.arrival_s, "")) in ttft_s
        ]
    )


def _within(timings: Timings, phases: Sequence[Sequence[ClientTiming]]) -> Timings:
    """Return the timings with only the steps of these phases."""
    spans = [
        (phase[0].due_s, max([each.due_s for each in phase] + [time for each in phase for time in each.token_times_s]))
        for phase in phases
        if phase
    ]
    if not spans:
        return timings
    steps = [step for step in timings.steps if any(start <= step.reply_s <= end for start, end in spans)]
    return replace(timings, steps=steps)


def _error_notes(step: Fit, take: Fit) -> dict[str, Any]:
    errors = [abs(ratio - 1) for shape, ratio in step.tested if shape.verifies_drafts]
    return {
        "steps_fitted": step.num_fitted,
        "steps_held_out": step.num_held_out,
        "step_error_median": round(step.median_error, 4),
        "step_error_p95": round(step.p95_error, 4),
        "draft_steps_held_out": len(errors),
        "draft_steps_error_median": round(float(np.median(errors)), 4) if errors else None,
        "take_error_median": round(take.median_error, 4),
    }


def _take_s(step: MeasuredStep) -> float:
    assert step.next_schedule_s is not None
    return step.next_schedule_s - step.reply_s


def _median(seconds: Sequence[float]) -> float:
    return max(0.0, float(f"{np.median(seconds):.3g}")) if seconds else 0.0


def _lead_s(steps: Sequence[MeasuredStep]) -> float:
    """Return how long before its end a long step is announced, at which time the next step is scheduled."""
    leads = [
        step.reply_s - after.scheduled_s
        for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
        if min(before.seconds, step.seconds) > LONG_STEP_S and before.reply_s < after.scheduled_s < step.reply_s
    ]
    return float(f"{np.median(leads):.3g}") if len(leads) >= MIN_LEADS else DEFAULT_LEAD_S


# --- intervals in which other programs slowed the machine -------------------------------------------------------------


@dataclass(frozen=True)
class SlowIntervals:
    """Intervals of a measurement in which steps of all shapes took longer."""

    factors: Mapping[int, float] = field(default_factory=dict)
    """Number of a slow interval -> factor by which its steps took longer."""
    num_intervals: int = 1

    def factor(self, time: float) -> float:
        """Return by what factor steps took longer at a time."""
        return self.factors.get(int(time // INTERVAL_S), 1.0)

    @property
    def mean(self) -> float:
        return 1 + sum(each - 1 for each in self.factors.values()) / self.num_intervals


def find_slow_intervals(steps: Sequence[MeasuredStep]) -> SlowIntervals:
    """Compare each interval's steps with a model of all steps, iterating with the slow intervals corrected. Otherwise a
    slow second would slow only the kind of steps that were measured then.
    """
    numbers = [int(each.reply_s // INTERVAL_S) for each in steps]
    measured = np.array([each.seconds for each in steps])
    slow = SlowIntervals(num_intervals=len(set(numbers)))
    for _ in range(NUM_ITERATIONS):
        factors = np.array([slow.factor(each.reply_s) for each in steps])
        fitted = fit_steps(steps, (measured / factors).tolist(), held_out=False)
        ratios: dict[int, list[float]] = defaultdict(list)
        for number, each, seconds in zip(numbers, steps, measured.tolist(), strict=True):
            ratios[number].append(seconds / max(fitted.seconds(each.shape, not each.ahead), 1e-9))
        measurable = {number: each for number, each in ratios.items() if len(each) >= MIN_STEPS_PER_INTERVAL}
        medians = {number: float(np.median(each)) for number, each in measurable.items()}
        middle = float(np.median(list(medians.values()))) if medians else 1.0
        found = {number: median / middle for number, median in medians.items() if median > SLOW_FACTOR * middle}
        slow = SlowIntervals(found, len(ratios))
    return slow


# --- the event loop ---------------------------------------------------------------------------------------------------


class EventLoopCosts(NamedTuple):
    """Costs of the event loop in seconds; see `Profile`."""

    request_s: float
    token_s: float
    client_s: float


SEARCH_START: Final = EventLoopCosts(0.001, 0.00005, 0.0005)


class _LoopEvent(NamedTuple):
    """One piece of work of the event loop."""

    time_s: float
    num_tokens: int
    """0: the event is a request that is read."""
    done_s: float
    """Arrival of the request at the scheduler, or of the middle token at its client."""


def fit_event_loop(
    timings: Timings,
    clients: Sequence[ClientTiming],
    take_s: Callable[[MeasuredStep], float],
    first: EventLoopCosts = SEARCH_START,
) -> EventLoopCosts | None:
    """Search for the costs with which a replay of the event loop comes closest to the measured delays; None without
    timings.

    The event loop does one thing after the other: it reads a request or sends a token. The search varies one cost at a
    time from `first` on. `take_s`: returns the time from a step's reply until the event loop gets its tokens.
    """
    events = sorted(_loop_events(timings, clients, take_s))
    if not events:
        return None
    best, least = first, _distance(events, first)
    for _ in range(NUM_ITERATIONS):
        before = best
        for name in EventLoopCosts._fields:
            for factor in FACTORS:
                candidate = best._replace(**{name: factor * getattr(before, name)})
                distance = _distance(events, candidate)
                if distance < least:
                    best, least = candidate, distance
    return best


def _loop_events(
    timings: Timings, clients: Sequence[ClientTiming], take_s: Callable[[MeasuredStep], float]
) -> list[_LoopEvent]:
    names = {name.rpartition("-")[0]: name for name in timings.arrivals}
    arrived: dict[float, list[float]] = defaultdict(list)
    events = []
    for each in clients:
        name = names.get(each.request_id)
        if name is None:
            continue
        events.append(_LoopEvent(each.due_s, 0, timings.arrivals[name]))
        for reply, time in zip(timings.replies.get(name, []), each.token_times_s, strict=False):
            arrived[reply].append(time)
    sent = ((step, sorted(arrived[step.reply_s])) for step in timings.steps if step.reply_s in arrived)
    events += [_LoopEvent(step.reply_s + take_s(step), len(times), times[len(times) // 2]) for step, times in sent]
    return events


def _distance(events: Sequence[_LoopEvent], costs: EventLoopCosts) -> float:
    """Return the mean absolute log ratio of delays; requests and tokens have the same weight."""
    request_s, token_s, client_s = costs
    free = -math.inf
    sums, counts = [0.0, 0.0], [0, 0]
    for time, count, done in events:
        if count:
            start = max(free, time)
            free = start + count * token_s
            predicted = start + (count // 2 + 1) * token_s + client_s
        else:
            free = predicted = max(free, time + client_s) + request_s
        kind = count > 0
        sums[kind] += abs(math.log((predicted - time + FLOOR_S) / (max(0.0, done - time) + FLOOR_S)))
        counts[kind] += 1
    return sum(total / max(1, count) for total, count in zip(sums, counts, strict=True))
