"""A profile of what was measured: steps of recordings, and what clients saw beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from llm_serving.errors import RecordingError

from llm_serving_simulator.cost_model import CostModel
from llm_serving_simulator.disturbed_spells import disturbed_spells
from llm_serving_simulator.event_loop import LoopCosts, fit_loop
from llm_serving_simulator.fitting import MASTER_PIECES, Fit, fit
from llm_serving_simulator.http_player import Seen
from llm_serving_simulator.measured_steps import LONG_STEP_S, MeasuredStep, Timings
from llm_serving_simulator.profile import IDLE_FOR_S, Profile
from llm_serving_simulator.reach import reach_of
from llm_serving_simulator.step_fit import fit_steps, fitted_steps

MIN_STEPS: Final = 50
LOOP: Final = LoopCosts(0.001, 0.00005, 0.0005)
"""Where the search begins."""
LEAD_S: Final = 0.005
"""Where no step was long enough to tell."""


class Calibration(NamedTuple):
    profile: Profile
    step: Fit
    take: Fit


def calibrate(
    timings: Timings,
    phases: Sequence[Sequence[Seen]] = (),
    *,
    name: str,
    source: str,
    notes: dict[str, Any] | None = None,
    seed: int = 1,
) -> Calibration:
    """Fits all of a profile that was measured; what was not is 0.

    The time of a step is that from the reply before to its own where it was formed ahead; of one that was not, as those
    that verify draft tokens, it begins with its forming, which is fitted beside. What sending tokens and reading
    requests meanwhile takes of it is a piece of its own: a step behind one that chose many tokens, or beside which
    requests come, is told from one that has the machine to itself. What others took of the machine is left out.

    Args:
        timings: Of the scheduler.
        phases: What clients saw of the same requests, in spans of time; what was recorded outside of these is left
            out. Without any the event loop takes no time.
        name: Of the profile.
        source: Where its figures come from.
        notes: For people; errors and counts are added.
        seed: Draws which steps are held out.

    Raises:
        RecordingError: There are too few steps.
    """
    timings, seen = _within(timings, phases), [each for phase in phases for each in phase]
    steps = [each for each in timings.steps if each.before_s > float("-inf")]
    if len(steps) < MIN_STEPS:
        raise RecordingError(f"a profile wants at least {MIN_STEPS} steps. Given: {len(steps)}")
    fitted = fitted_steps(steps)
    spells = disturbed_spells(fitted)
    as_usual = [each.seconds / spells.factor(each.replied_s) for each in fitted]
    step = fit_steps(fitted, as_usual, seed)
    taken = [each for each in steps if each.goes_on_s is not None]
    take = fit([each.shape for each in taken], [_take_s(each) for each in taken], MASTER_PIECES, seed)
    loop = fit_loop(timings, seen, _Taken(take.model), LOOP) or LoopCosts(0.0, 0.0, 0.0)
    wake_s = _extra([each.asked_s - each.came_s for each in steps if not each.ahead and each.came_s is not None])
    profile = Profile(
        name=name,
        source=source,
        measured=True,
        step=step.model,
        form=step.sometimes,
        take=take.model,
        wake_s=wake_s,
        lead_s=_lead(steps),
        request_s=float(f"{loop.request_s:.3g}"),
        token_s=float(f"{loop.token_s:.3g}"),
        client_s=float(f"{loop.client_s:.3g}"),
        spread=step.spread,
        num_blocks=timings.num_blocks,
        block_size=timings.block_size,
        measured_to=reach_of([each.shape for each in fitted]),
        notes={**(notes or {}), **_told(step, take), "disturbed": round(spells.mean - 1, 3)},
    )
    found = [each for each in steps if _wakes_idle(each) and spells.factor(each.replied_s) == 1.0]
    return Calibration(replace(profile, idle_s=_idle_s(found, timings, seen, profile)), step, take)


def _wakes_idle(step: MeasuredStep) -> bool:
    return step.came_s is not None and step.came_s - step.before_s > IDLE_FOR_S


def _idle_s(steps: Sequence[MeasuredStep], timings: Timings, seen: Sequence[Seen], profile: Profile) -> float:
    """How much longer than predicted it took for an idle server until a client had its first token.

    Where no client tells, until there was a reply.
    """
    predicted = [profile.form.seconds(each.shape) + profile.step.seconds(each.shape) for each in steps]
    if not seen:
        return _extra([each.seconds - known for each, known in zip(steps, predicted, strict=True)])
    names = {time: name.rpartition("-")[0] for name, time in timings.arrivals.items()}
    took = {each.request_id: each.token_times_s[0] - each.due_s for each in seen if each.token_times_s}
    around = profile.request_s + profile.wake_s + profile.token_s + 2 * profile.client_s
    return _extra(
        [
            took[name] - around - known - profile.take.seconds(each.shape)
            for each, known in zip(steps, predicted, strict=True)
            if each.came_s is not None and (name := names.get(each.came_s, "")) in took
        ]
    )


def _within(timings: Timings, phases: Sequence[Sequence[Seen]]) -> Timings:
    """The steps of these phases."""
    spans = [
        (phase[0].due_s, max([each.due_s for each in phase] + [time for each in phase for time in each.token_times_s]))
        for phase in phases
        if phase
    ]
    if not spans:
        return timings
    steps = [step for step in timings.steps if any(begin <= step.replied_s <= end for begin, end in spans)]
    return replace(timings, steps=steps)


def _told(step: Fit, take: Fit) -> dict[str, Any]:
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
    assert step.goes_on_s is not None
    return step.goes_on_s - step.replied_s


class _Taken:
    """Seconds from the reply of a step until its tokens come to the event loop."""

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def __call__(self, step: MeasuredStep) -> float:
        return self._model.seconds(step.shape) if step.goes_on_s is None else _take_s(step)


def _extra(seconds: Sequence[float]) -> float:
    """Their median, if that is one."""
    return max(0.0, float(f"{np.median(seconds):.3g}")) if seconds else 0.0


def _lead(steps: Sequence[MeasuredStep]) -> float:
    """Before its end a long step is announced: the next one is formed then."""
    leads = [
        step.replied_s - after.asked_s
        for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
        if min(before.seconds, step.seconds) > LONG_STEP_S and before.replied_s < after.asked_s < step.replied_s
    ]
    return float(f"{np.median(leads):.3g}") if len(leads) >= 10 else LEAD_S
