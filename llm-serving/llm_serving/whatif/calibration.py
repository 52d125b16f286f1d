"""A profile of what was measured: steps of recordings, and what clients saw beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from llm_serving.errors import RecordingError
from llm_serving.whatif.cost_model import CONSTANT, CostModel, Piece
from llm_serving.whatif.event_loop import LoopCosts, fit_loop
from llm_serving.whatif.fitting import MASTER_PIECES, STEP_PIECES, Fit, fit
from llm_serving.whatif.http_player import Seen
from llm_serving.whatif.measured_steps import LONG_STEP_S, MeasuredStep, Timings
from llm_serving.whatif.profile import Profile

MIN_STEPS: Final = 50
LOOP: Final = LoopCosts(0.001, 0.00005, 0.0005)
"""Where the search begins."""
PAUSE_S: Final = 0.01
"""Without a step, after which a server has rested."""
MIN_RESTED: Final = 10
LEAD_S: Final = 0.005
"""Where no step was long enough to tell."""


class Calibration(NamedTuple):
    profile: Profile
    step: Fit
    take: Fit
    num_alone: int
    """Steps that were formed while nothing was computed."""


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

    The time of a step is that from the reply before to its own where it was formed ahead, as the server does whenever
    it computes: so it has in it whatever disturbs a WorkAgent while the master sends and clients read.

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
    ahead, alone = [each for each in steps if each.ahead], [each for each in steps if not each.ahead]
    fitted = ahead if len(ahead) >= MIN_STEPS else steps
    if len(fitted) < MIN_STEPS:
        raise RecordingError(f"a profile wants at least {MIN_STEPS} steps. Given: {len(fitted)}")
    step = fit([each.shape for each in fitted], [each.seconds for each in fitted], STEP_PIECES, seed)
    taken = [each for each in steps if each.goes_on_s is not None and each.seconds < LONG_STEP_S]
    take = fit([each.shape for each in taken], [_take_s(each) for each in taken], MASTER_PIECES, seed)
    form = _form(alone, step.model)
    loop = fit_loop(timings, seen, _Taken(take.model), LOOP) or LoopCosts(0.0, 0.0, 0.0)
    profile = Profile(
        name=name,
        source=source,
        measured=True,
        step=step.model,
        form=form,
        take=take.model,
        lead_s=_lead(steps),
        request_s=float(f"{loop.request_s:.3g}"),
        token_s=float(f"{loop.token_s:.3g}"),
        client_s=float(f"{loop.client_s:.3g}"),
        spread=step.spread,
        num_blocks=timings.num_blocks,
        notes={**(notes or {}), **_told(step, take)},
    )
    return Calibration(profile, step, take, len(alone))


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
    return {
        "steps_fitted": step.num_fitted,
        "steps_held_out": step.num_held_out,
        "step_error_median": round(step.median_error, 4),
        "step_error_p95": round(step.p95_error, 4),
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
        if step.goes_on_s is not None and step.seconds < LONG_STEP_S:
            return _take_s(step)
        return self._model.seconds(step.shape)


def _form(alone: Sequence[MeasuredStep], model: CostModel) -> CostModel:
    """What steps take longer that were formed while nothing was computed: waking, forming, sending.

    After a pause it is more than between two requests of one client, and a server with nothing to do has pauses.
    """
    rested = [each for each in alone if each.came_s is not None and each.came_s - each.before_s > PAUSE_S]
    alone = rested if len(rested) >= MIN_RESTED else alone
    if not alone:
        return CostModel()
    extra = float(np.median([each.seconds - model.seconds(each.shape) for each in alone]))
    return CostModel((Piece(CONSTANT, float(f"{extra:.4g}")),)) if extra > 0 else CostModel()


def _lead(steps: Sequence[MeasuredStep]) -> float:
    """Before its end a long step is announced: the next one is formed then."""
    leads = [
        step.replied_s - after.asked_s
        for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
        if min(before.seconds, step.seconds) > LONG_STEP_S and before.replied_s < after.asked_s < step.replied_s
    ]
    return float(f"{np.median(leads):.3g}") if len(leads) >= 10 else LEAD_S
