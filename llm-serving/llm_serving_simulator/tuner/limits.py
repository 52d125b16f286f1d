"""What would have to change where no configuration reaches a goal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig

from llm_serving_simulator.cost_model import CostModel
from llm_serving_simulator.figures import Figures, figures_of
from llm_serving_simulator.load import Load
from llm_serving_simulator.profile import Profile
from llm_serving_simulator.reach import told_beyond
from llm_serving_simulator.report import number
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.tuner.knobs import Knob
from llm_serving_simulator.tuner.trial import Trial, Trials

FULL: Final = 0.97
"""Share of the time that WorkAgents compute, or of the blocks, beyond which more of them would help."""


class Relief(NamedTuple):
    """Something beyond the configuration that might change, and what it would bring."""

    what: str
    figures: Figures
    reaches: bool
    """Whether all constraints are kept then."""
    beyond: str = ""
    """Where steps would be larger than any that was measured: up to which size, and which were."""


def limits(trial: Trial, knobs: Sequence[Knob]) -> Iterator[str]:
    """What the nearest configuration is at the end of: the device, its memory, the values of a knob."""
    figures = trial.figures
    if figures.get("busy_share", 0.0) >= FULL:
        yield f"the WorkAgents compute {figures['busy_share']:.0%} of the time: the hardware limits"
    if figures.get("block_use_peak", 0.0) >= FULL:
        yield f"{figures['block_use_peak']:.0%} of the blocks are in use at times: pa_config.num_blocks limits"
    for knob in knobs:
        if knob.key in trial.changes and knob.at_an_end(value := trial.changes[knob.key]):
            yield f"{knob.key}: {value} is the last of the values tried"


def reliefs(trials: Trials, trial: Trial) -> Iterator[Relief]:
    """What one more replica, twice the blocks, steps in half the time and half the load would bring, one at a time."""
    config = trials.configure(trial.changes)
    num = config.num_replicas
    yield _relief(trials, f"{num + 1} replicas in place of {num}", _with_replicas(config, num + 1))
    num_blocks = trials.own.result.num_blocks if trials.own.result is not None else 0
    blocks = config.pa.num_blocks or num_blocks
    yield _relief(trials, f"{2 * blocks} blocks in place of {blocks}", _with_blocks(config, 2 * blocks))
    yield _relief(trials, "steps in half the time", config, faster(trials.profile, 2.0))
    if any(stream.concurrency is None for stream in trials.load.streams):
        yield _relief(trials, "half the requests a second", config, load=trials.load.faster(0.5))


def told(trials: Trials, relief: Relief) -> str:
    """One line of a relief."""
    values = ", ".join(
        f"{each.figure} {number(each.figure.key, relief.figures.get(each.figure.key, math.nan))}"
        for each in trials.goal.constraints
    )
    beyond = f"; {relief.beyond}" if relief.beyond else ""
    return f"{relief.what}: {values} ({'reaches the goal' if relief.reaches else 'not enough'}){beyond}"


def faster(profile: Profile, factor: float) -> Profile:
    """A device that takes so many times less for a step."""
    pieces = tuple(replace(each, seconds=each.seconds / factor) for each in profile.step.pieces)
    return replace(profile, name=f"{profile.name}, {factor:g} times as fast", step=CostModel(pieces))


def _relief(
    trials: Trials, what: str, config: ServingConfig, profile: Profile | None = None, load: Load | None = None
) -> Relief:
    result = Simulation(config, load or trials.load, profile or trials.profile, trials.seed).run()
    figures = figures_of(result)
    return Relief(what, figures, trials.goal.violation(figures) == 0, told_beyond(result.notices))


def _with_replicas(config: ServingConfig, num: int) -> ServingConfig:
    return replace(config, cluster=replace(config.cluster, replicas=num))


def _with_blocks(config: ServingConfig, num_blocks: int) -> ServingConfig:
    return replace(config, pa=replace(config.pa, num_blocks=num_blocks))
