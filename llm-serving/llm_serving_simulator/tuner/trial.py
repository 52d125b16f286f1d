"""Trials: simulations of changed configurations, stopped early where they cannot meet the objective any more.

This module also finds the limits of a configuration, and which changes of one thing would meet the constraints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.errors import ConfigError

from llm_serving_simulator.figures import Figures, Outcome, SimulationResult, figures_of
from llm_serving_simulator.profile import CostModel, Profile, extrapolation_notices
from llm_serving_simulator.report import format_figure
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.tuner.problem import (
    Changes,
    FigureConstraint,
    SearchParameter,
    TuningObjective,
    neighbours,
    yaml_text,
)
from llm_serving_simulator.workload import Workload

INVALID_SCORE: Final = -1e9
"""Score of an invalid configuration, lower than that of any violation."""
MAX_DURATION_FACTOR: Final = 4.0
"""Multiple of the baseline's virtual duration after which a trial is stopped."""

Configure = Callable[[Changes], ServingConfig]
"""Returns the baseline configuration with changes; raises ConfigError."""


class Trial(NamedTuple):
    changes: Changes
    score: float
    """Below 0 if a constraint is violated."""
    figures: Figures
    """Empty for an invalid configuration; of a stopped trial, the figures until then."""
    result: SimulationResult | None = None
    """The result without its outcomes, which would take much memory."""

    @property
    def feasible(self) -> bool:
        return self.score >= 0


@dataclass
class TrialRunner:
    """Simulates each configuration once. Raise ConfigError if the baseline configuration cannot be simulated."""

    configure: Configure
    workload: Workload
    profile: Profile
    objective: TuningObjective
    seed: int = 1

    def __post_init__(self) -> None:
        self._done: dict[frozenset[tuple[str, object]], Trial] = {}
        self._any_feasible = False
        result = self._simulation(self.configure({})).run()
        figures = figures_of(result)
        self._max_duration_s = MAX_DURATION_FACTOR * max(each.end_s for each in result.outcomes)
        self.baseline = self._record(Trial({}, self.objective.score(figures, figures), figures, result))

    def run(self, changes: Changes, *, to_the_end: bool = False) -> Trial:
        """Return the trial of these changes of the baseline, simulated or known. `to_the_end`: so that all figures are
        complete.
        """
        known = self._done.get(frozenset(changes.items()))
        if known is not None and (known.result is None or known.result.complete or not to_the_end):
            return known
        try:
            config = self.configure(changes)
        except ConfigError:
            return self._record(Trial(changes, INVALID_SCORE, {}))
        simulation = self._simulation(config)
        classes, duration_s = config.request_classes, self._max_duration_s
        early_stop = EarlyStop(self.objective, self.workload, classes, duration_s, strict=self._any_feasible)
        result = simulation.run() if to_the_end else simulation.run(early_stop)
        figures = figures_of(result)
        score = self.objective.score(figures, self.baseline.figures)
        num_requests = self.workload.num_requests
        if not result.complete:
            # Worse than any feasible trial, and the worse the more requests are unfinished.
            unfinished = sum(not each.finish for each in result.outcomes) + num_requests - len(result.outcomes)
            score = min(score, 0.0) - 1.0 - unfinished / num_requests
        return self._record(Trial(changes, score, figures, result))

    def full_result(self, trial: Trial) -> SimulationResult:
        """Simulate a trial again and return the result with its outcomes."""
        return self._simulation(self.configure(trial.changes)).run()

    def _simulation(self, config: ServingConfig) -> Simulation:
        return Simulation(config, self.workload, self.profile, self.seed)

    def _record(self, trial: Trial) -> Trial:
        if trial.result is not None:
            trial = trial._replace(result=replace(trial.result, outcomes=[], block_use=[]))
        self._done[frozenset(trial.changes.items())] = trial
        self._any_feasible = self._any_feasible or trial.feasible
        return trial


@dataclass
class EarlyStop:
    """Decides whether a simulation is stopped, because no later request can save a violated constraint.

    `max_duration_s`: virtual time after which every simulation is stopped. `strict`: stop at the first violated
    constraint, because a feasible trial is known. Otherwise the size of the violation matters.
    """

    objective: TuningObjective
    workload: Workload
    classes: Sequence[RequestClass]
    max_duration_s: float
    strict: bool

    def __post_init__(self) -> None:
        counts: Counter[str] = Counter()
        for stream in self.workload.streams:
            for each in stream.requests:
                name = class_of(each.priority_in(self.classes), self.classes).name
                counts.update(("", name, f"tenant {each.tenant}"))
        self._watched = [
            (each, count_misses, _allowed_misses(each, counts[each.figure.group]))
            for each in self.objective.constraints
            if (count_misses := MISSES.get(each.figure.name)) is not None
        ]

    def __call__(self, outcomes: Sequence[Outcome], now: float) -> bool:
        """Return whether to stop at the virtual time `now`."""
        if now > self.max_duration_s:
            return True
        return self.strict and any(
            count_misses(_members(outcomes, each.figure.group), each.target, now) > allowed
            for each, count_misses, allowed in self._watched
        )


def _members(outcomes: Sequence[Outcome], group: str) -> Sequence[Outcome]:
    if not group:
        return outcomes
    if group.startswith("tenant "):
        tenant = group.removeprefix("tenant ")
        return [each for each in outcomes if each.tenant == tenant]
    return [each for each in outcomes if each.request_class.name == group]


def _late_first_tokens(outcomes: Sequence[Outcome], target_ms: float, now: float) -> int:
    return sum(
        (each.token_times_s[0] if each.token_times_s else now) - each.due_s > target_ms / 1e3
        for each in outcomes
        if each.finish in ("", "stop", "length")
    )


def _late_ends(outcomes: Sequence[Outcome], target_ms: float, now: float) -> int:
    return sum(
        (each.end_s if each.finish else now) - each.due_s > target_ms / 1e3
        for each in outcomes
        if each.finish in ("", "stop", "length")
    )


def _missed_objectives(outcomes: Sequence[Outcome], target: float, now: float) -> int:
    return sum(bool(each.finish) and not each.met_slo for each in outcomes)


def _refused(outcomes: Sequence[Outcome], target: float, now: float) -> int:
    return sum(each.finish == "refused" for each in outcomes)


def _allowed_misses(constraint: FigureConstraint, count: int) -> float:
    """Return how many of `count` requests may miss the target before the constraint is certainly violated."""
    name = constraint.figure.name
    if name == "refused":
        return constraint.target
    if name == "goodput_share":
        return (1 - constraint.target) * count
    share = 0.01 if "_p99_" in name else 0.5
    return math.ceil(share * count) + 1  # a percentile lies between two requests


MISSES: Final[dict[str, Callable[[Sequence[Outcome], float, float], int]]] = {
    "ttft_p50_ms": _late_first_tokens,
    "ttft_p99_ms": _late_first_tokens,
    "latency_p50_ms": _late_ends,
    "latency_p99_ms": _late_ends,
    "goodput_share": _missed_objectives,
    "refused": _refused,
}
"""Count the requests that miss the target of a figure until now."""


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
