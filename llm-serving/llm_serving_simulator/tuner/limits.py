"""Limits of a configuration, and changes that would meet the constraints: of one key, or beyond the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig

from llm_serving_simulator.figures import Figures, figures_of
from llm_serving_simulator.profile import CostModel, Profile, extrapolation_notices
from llm_serving_simulator.report import format_figure
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.tuner.search_space import SearchParameter, neighbours, yaml_text
from llm_serving_simulator.tuner.trial import Trial, TrialRunner
from llm_serving_simulator.workload import Workload

FULL: Final = 0.97
"""Share of busy time, or of blocks in use, from which more hardware would help."""


class Improvement(NamedTuple):
    """A change beyond the configuration, and the figures with it."""

    description: str
    figures: Figures
    is_sufficient: bool
    """Whether all constraints are met."""
    extrapolated: str = ""
    """Notice about extrapolated steps."""


def limits(trial: Trial, parameters: Sequence[SearchParameter]) -> Iterator[str]:
    """Yield what the trial uses completely: the WorkAgents, the blocks, the values of a parameter."""
    figures = trial.figures
    if figures.get("busy_share", 0.0) >= FULL:
        yield f"the WorkAgents compute {figures['busy_share']:.0%} of the time: the hardware limits"
    if figures.get("block_use_peak", 0.0) >= FULL:
        yield f"{figures['block_use_peak']:.0%} of the blocks are in use at times: pa_config.num_blocks limits"
    for each in parameters:
        if each.key in trial.changes and each.is_extreme(value := trial.changes[each.key]):
            yield f"{each.key}: {value} is the last of the values tried"


def improvements(trials: TrialRunner, trial: Trial) -> Iterator[Improvement]:
    """Yield the effect of one more replica, twice the blocks, steps in half the time, and half the request rate."""
    config = trials.configure(trial.changes)
    num = config.num_replicas
    replicas = replace(config, cluster=replace(config.cluster, replicas=num + 1))
    yield _improvement(trials, f"{num + 1} replicas in place of {num}", replicas)
    baseline = trials.baseline.result
    blocks = config.pa.num_blocks or (baseline.num_blocks if baseline is not None else 0)
    more_blocks = replace(config, pa=replace(config.pa, num_blocks=2 * blocks))
    yield _improvement(trials, f"{2 * blocks} blocks in place of {blocks}", more_blocks)
    yield _improvement(trials, "steps in half the time", config, faster(trials.profile, 2.0))
    if any(stream.concurrency is None for stream in trials.workload.streams):
        yield _improvement(trials, "half the requests a second", config, workload=trials.workload.faster(0.5))


def described(trials: TrialRunner, improvement: Improvement) -> str:
    values = ", ".join(
        f"{each.figure} {format_figure(each.figure.key, improvement.figures.get(each.figure.key, math.nan))}"
        for each in trials.objective.constraints
    )
    extrapolated = f"; {improvement.extrapolated}" if improvement.extrapolated else ""
    verdict = "reaches the goal" if improvement.is_sufficient else "not enough"
    return f"{improvement.description}: {values} ({verdict}){extrapolated}"


def what_would_meet(trials: TrialRunner) -> Iterator[str]:
    """Yield lines: the constraints as they are, the neighbouring values that meet them, and other improvements."""
    objective, baseline = trials.objective, trials.baseline
    for each in objective.constraints:
        value = format_figure(each.figure.key, baseline.figures[each.figure.key])
        yield f"{each}: it is {value}, {'met' if each.is_met(baseline.figures) else 'NOT MET'}"
    if objective.violation(baseline.figures) == 0:
        return
    num_tried = 0
    yield "one key at a time:"
    for parameter, other in neighbours(trials.configure({}), trials.workload, trials.profile):
        num_tried += 1
        trial = trials.run({parameter.key: other})
        if trial.feasible and trial.result is not None and trial.result.complete:
            shown = ", ".join(
                f"{each.figure} {format_figure(each.figure.key, trial.figures[each.figure.key])}"
                for each in objective.constraints
            )
            notice = extrapolation_notices(trial.result.notices)
            change = f"{yaml_text(parameter.current_value)} -> {yaml_text(other)}"
            yield f"  {parameter.key}: {change}: {shown} (sufficient){f'; {notice}' if notice else ''}"
    yield f"  the other values of {num_tried} are not sufficient alone; `llm-serving tune` combines several"
    yield from limits(baseline, ())
    yield "beyond the YAML, one thing at a time:"
    for improvement in improvements(trials, baseline):
        yield f"  {described(trials, improvement)}"


def faster(profile: Profile, factor: float) -> Profile:
    """Return the profile of a device whose steps take a `factor`th of the time."""
    terms = tuple(replace(each, seconds=each.seconds / factor) for each in profile.step.terms)
    return replace(profile, name=f"{profile.name}, {factor:g} times as fast", step=CostModel(terms))


def _improvement(
    trials: TrialRunner,
    description: str,
    config: ServingConfig,
    profile: Profile | None = None,
    workload: Workload | None = None,
) -> Improvement:
    result = Simulation(config, workload or trials.workload, profile or trials.profile, trials.seed).run()
    figures = figures_of(result)
    is_sufficient = trials.objective.violation(figures) == 0
    return Improvement(description, figures, is_sufficient, extrapolation_notices(result.notices))
