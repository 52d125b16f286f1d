"""What each change brings: the same configuration with that one taken back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llm_serving_simulator.figures import LESS_IS_BETTER
from llm_serving_simulator.report import number
from llm_serving_simulator.tuner.goal import Goal
from llm_serving_simulator.tuner.trial import Trial, Trials

NOTHING: Final = 0.005
"""Share of the objective, or of what constraints are missed by, below which a change brings nothing."""
SIDE_EFFECT: Final = 0.05
"""Share by which a figure that is not in the goal must get worse to be called a cost."""
MAX_COSTS: Final = 3
SIDE_FIGURES: Final = ("output_tokens_per_s", "goodput_share", "refused", "ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms")
"""Looked at for costs, of all and of each class."""


@dataclass(frozen=True)
class Effect:
    """Of one change, the others being made."""

    key: str
    was: Any
    value: Any
    without: Trial
    """The tuned configuration with this key taken back."""

    def brings(self, goal: Goal, tuned: Trial) -> str:
        """What of the goal would be worse without; constraints count with their margin."""
        if not self.without.figures:
            return "it would be refused beside the other changes"
        told = [
            f"{each.figure} would be {_number(each.figure.key, self.without)}, "
            f"{'above' if each.figure.less_is_better else 'below'} {number(each.figure.key, each.aim)}"
            for each in goal.constraints
            if each.excess(self.without.figures) > max(NOTHING, each.excess(tuned.figures) + NOTHING)
        ]
        name = goal.objective.key
        before, after = (each.figures.get(name, math.nan) for each in (self.without, tuned))
        if not _alike(before, after) and (after > before) == goal.most:
            told.append(f"{name} would be {number(name, before)}, not {number(name, after)}")
        return "; ".join(told) or "little would be worse: it goes with the other changes"

    def costs(self, goal: Goal, tuned: Trial) -> str:
        """What else is worse with it; nothing for nothing."""
        in_goal = {each.figure.key for each in goal.constraints}
        worse = []
        for key, after in tuned.figures.items():
            name, before = key.rpartition(".")[2], self.without.figures.get(key, math.nan)
            looked_at = name in SIDE_FIGURES or key == goal.objective.key
            if key in in_goal or not looked_at or key.startswith("tenant ") or before == after:
                continue
            change = (after - before) / max(abs(before), 1e-9) * (1 if name in LESS_IS_BETTER else -1)
            if change > SIDE_EFFECT:
                worse.append((change, f"{key} {number(key, before)} -> {number(key, after)}"))
        return ", ".join(text for _, text in sorted(worse, reverse=True)[:MAX_COSTS])


def put_back(trials: Trials, best: Trial) -> Trial:
    """The best trial without the changes that bring nothing, those first that bring least."""
    while best.changes:
        without = [trials.of(_less(best.changes, key)) for key in best.changes]
        ranked = sorted(without, key=lambda each: -each.score)
        kept = best
        for each in ranked:
            (key,) = best.changes.keys() - each.changes.keys()
            tried = trials.of(_less(kept.changes, key))
            if brings_nothing(trials.goal, tried, best):
                kept = tried
        if kept is best:
            return best
        best = kept
    return best


def brings_nothing(goal: Goal, without: Trial, best: Trial) -> bool:
    """Whether a trial with fewer changes serves the goal as well as the best, but for next to nothing."""
    if without.feasible != best.feasible:
        return without.feasible
    if not best.feasible:
        return without.score >= best.score * (1 + NOTHING)
    name = goal.objective.key
    before, after = without.figures.get(name, math.nan), best.figures.get(name, math.nan)
    return before >= after * (1 - NOTHING) if goal.most else before <= after * (1 + NOTHING)


def effects(trials: Trials, tuned: Trial, own_values: Mapping[str, Any]) -> list[Effect]:
    """Of each change of the tuned configuration, that which brings most first."""
    found = [
        Effect(key, own_values[key], value, trials.of(_less(tuned.changes, key), to_the_end=True))
        for key, value in tuned.changes.items()
    ]
    return sorted(found, key=lambda each: each.without.score)


def _less(changes: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name != key}


def _number(key: str, trial: Trial) -> str:
    return number(key, trial.figures.get(key, math.nan))


def _alike(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= NOTHING * max(abs(one), abs(other))
