"""Looks for the configuration with the best score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from llm_serving_simulator.tuner.knobs import Changes, Knob
from llm_serving_simulator.tuner.trial import Trial, Trials

Places = Mapping[str, int]
"""By key of a knob, which of its values."""


class Sampler(Protocol):
    """Says what to try next; docs of Optuna call this ask and tell."""

    def ask(self) -> Places:
        """A value for each knob."""

    def tell(self, score: float) -> None:
        """What came of what was asked for last; more is better."""


OnTrial = Callable[[Trial, Trial], None]
"""Told of each trial, and of the best so far."""


def search(
    trials: Trials, knobs: Sequence[Knob], sampler: Sampler, num_trials: int, on_trial: OnTrial = lambda *_: None
) -> Trial:
    """The best of so many trials, of equal ones the first; never worse than the configuration to begin with.

    Args:
        trials: Simulates.
        knobs: What may be turned.
        sampler: Over the same knobs.
        num_trials: Beside the configuration to begin with.
        on_trial: Told of each.
    """
    best = trials.own
    for _ in range(num_trials):
        trial = trials.of(changes_of(knobs, sampler.ask()))
        sampler.tell(trial.score)
        if trial.score > best.score:
            best = trial
        on_trial(trial, best)
    return best


def changes_of(knobs: Sequence[Knob], places: Places) -> Changes:
    """Those of these values that differ from the configuration to begin with."""
    return {each.key: each.values[places[each.key]] for each in knobs if places[each.key] != each.own}
