"""The search for the best configuration, and the removal of changes that have no effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llm_serving.errors import ConfigError

from llm_serving_simulator.figures import LESS_IS_BETTER
from llm_serving_simulator.report import format_figure
from llm_serving_simulator.tuner.problem import Changes, SearchParameter, TuningObjective
from llm_serving_simulator.tuner.trial import Trial, TrialRunner

Indices = Mapping[str, int]
"""Index of a parameter's value, by key."""
OnTrial = Callable[[Trial, Trial], None]
"""Called with each trial and the best one so far."""

RANDOM_SHARE: Final = 0.2
"""Share of the trials that are drawn before the sampler models anything."""
MIN_RANDOM: Final = 10

NO_EFFECT: Final = 0.005
"""Relative change of the objective, or of a violation, below which a configuration change has no effect."""
SIDE_EFFECT: Final = 0.05
"""Relative change from which another figure counts as a cost."""
MAX_COSTS: Final = 3
COST_FIGURES: Final = ("output_tokens_per_s", "goodput_share", "refused", "ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms")


class Sampler(Protocol):
    """Proposes trials, in the ask-and-tell interface of Optuna."""

    def ask(self) -> Indices: ...

    def tell(self, score: float) -> None:
        """Accept the score of the last proposal; higher is better."""


class TreeParzen:
    """Optuna's tree-structured Parzen estimator (Bergstra et al., NIPS 2011). It first proposes the baseline.
    `num_trials`: number of proposals that will be asked for. Raise ConfigError if Optuna is not installed.
    """

    def __init__(self, parameters: Sequence[SearchParameter], seed: int, num_trials: int) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("tuning needs Optuna: pip install -e 'llm-serving[tune]'") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parameters = parameters
        num_random = max(MIN_RANDOM, round(RANDOM_SHARE * num_trials))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=num_random)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._study.enqueue_trial({each.key: each.current for each in parameters})
        self._trial: Any = None

    def ask(self) -> Indices:
        self._trial = self._study.ask()
        return {each.key: self._index(each) for each in self._parameters}

    def tell(self, score: float) -> None:
        self._study.tell(self._trial, score)

    def _index(self, parameter: SearchParameter) -> int:
        if parameter.ordered:
            return int(self._trial.suggest_int(parameter.key, 0, len(parameter.values) - 1))
        return int(self._trial.suggest_categorical(parameter.key, range(len(parameter.values))))


def search(
    trials: TrialRunner,
    parameters: Sequence[SearchParameter],
    sampler: Sampler,
    num_trials: int,
    on_trial: OnTrial = lambda *_: None,
) -> Trial:
    """Return the best of `num_trials` trials and the baseline, the first one of several. `sampler`: of the same search
    space.
    """
    best = trials.baseline
    for _ in range(num_trials):
        trial = trials.run(changes_of(parameters, sampler.ask()))
        sampler.tell(trial.score)
        if trial.score > best.score:
            best = trial
        on_trial(trial, best)
    return best


def changes_of(parameters: Sequence[SearchParameter], indices: Indices) -> Changes:
    return {each.key: each.values[indices[each.key]] for each in parameters if indices[each.key] != each.current}


# --- ablation ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effect:
    """The effect of one change in addition to the other changes of the tuned configuration."""

    key: str
    was: Any
    value: Any
    without: Trial
    """The tuned configuration without this change."""

    def benefit(self, objective: TuningObjective, tuned: Trial) -> str:
        """Return which parts of the objective would be worse without the change; constraints include their margin."""
        if not self.without.figures:
            return "without it the other changes are invalid"
        losses = [
            f"{each.figure} would be {_shown(self.without, each.figure.key)}, "
            f"{'above' if each.figure.less_is_better else 'below'} {format_figure(each.figure.key, each.target)}"
            for each in objective.constraints
            if each.excess(self.without.figures) > max(NO_EFFECT, each.excess(tuned.figures) + NO_EFFECT)
        ]
        name = objective.figure.key
        before, after = (each.figures.get(name, math.nan) for each in (self.without, tuned))
        if not _is_similar(before, after) and (after > before) == objective.maximize:
            losses.append(f"{name} would be {format_figure(name, before)}, not {format_figure(name, after)}")
        return "; ".join(losses) or "small effect alone, in combination with the other changes"

    def cost(self, objective: TuningObjective, tuned: Trial) -> str:
        """Return which other figures the change makes worse; empty if none."""
        constrained = {each.figure.key for each in objective.constraints}
        worse = []
        for key, after in tuned.figures.items():
            name, before = key.rpartition(".")[2], self.without.figures.get(key, math.nan)
            is_watched = name in COST_FIGURES or key == objective.figure.key
            if key in constrained or not is_watched or key.startswith("tenant ") or before == after:
                continue
            change = (after - before) / max(abs(before), 1e-9) * (1 if name in LESS_IS_BETTER else -1)
            if change > SIDE_EFFECT:
                worse.append((change, f"{key} {format_figure(key, before)} -> {format_figure(key, after)}"))
        return ", ".join(text for _, text in sorted(worse, reverse=True)[:MAX_COSTS])


def revert_useless_changes(trials: TrialRunner, best: Trial) -> Trial:
    """Return the best trial without the changes that have no effect, the least useful ones reverted first."""
    while best.changes:
        without = [trials.run(_less(best.changes, key)) for key in best.changes]
        best_so_far = best
        for each in sorted(without, key=lambda each: -each.score):
            (key,) = best.changes.keys() - each.changes.keys()
            candidate = trials.run(_less(best_so_far.changes, key))
            if is_as_good(trials.objective, candidate, best):
                best_so_far = candidate
        if best_so_far is best:
            return best
        best = best_so_far
    return best


def is_as_good(objective: TuningObjective, candidate: Trial, best: Trial) -> bool:
    """Return whether a trial with fewer changes meets the objective as well as the best one, within `NO_EFFECT`."""
    if candidate.feasible != best.feasible:
        return candidate.feasible
    if not best.feasible:
        return candidate.score >= best.score * (1 + NO_EFFECT)
    name = objective.figure.key
    before, after = candidate.figures.get(name, math.nan), best.figures.get(name, math.nan)
    return before >= after * (1 - NO_EFFECT) if objective.maximize else before <= after * (1 + NO_EFFECT)


def effects_of(trials: TrialRunner, tuned: Trial, current_values: Mapping[str, Any]) -> list[Effect]:
    """Return the effect of each change of the tuned configuration, the most useful first."""
    found = [
        Effect(key, current_values[key], value, trials.run(_less(tuned.changes, key), to_the_end=True))
        for key, value in tuned.changes.items()
    ]
    return sorted(found, key=lambda each: each.without.score)


def _less(changes: Changes, key: str) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name != key}


def _shown(trial: Trial, key: str) -> str:
    return format_figure(key, trial.figures.get(key, math.nan))


def _is_similar(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= NO_EFFECT * max(abs(one), abs(other))
