"""Optuna's tree-structured Parzen estimator (Bergstra et al., NIPS 2011) as a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from llm_serving.errors import ConfigError

from llm_serving_simulator.tuner.knobs import Knob
from llm_serving_simulator.tuner.search import Places

RANDOM_SHARE: Final = 0.2
"""Of the trials, that are drawn before anything is modelled."""
MIN_RANDOM: Final = 10


class TreeParzen:
    """The first it asks for is the configuration to begin with.

    Args:
        knobs: What may be turned.
        seed: The same gives the same, told the same.
        num_trials: That will be asked for.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, knobs: Sequence[Knob], seed: int, num_trials: int) -> None:
        optuna = _optuna()
        self._knobs = knobs
        random = max(MIN_RANDOM, round(RANDOM_SHARE * num_trials))
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=random)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._study.enqueue_trial({each.key: each.own for each in knobs})
        self._trial: Any = None

    def ask(self) -> Places:
        self._trial = self._study.ask()
        return {each.key: self._place(each) for each in self._knobs}

    def tell(self, score: float) -> None:
        self._study.tell(self._trial, score)

    def _place(self, knob: Knob) -> int:
        if knob.ordered:
            return int(self._trial.suggest_int(knob.key, 0, len(knob.values) - 1))
        return int(self._trial.suggest_categorical(knob.key, range(len(knob.values))))


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ConfigError("tuning wants Optuna: pip install -e 'llm-serving[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
