"""One configuration tried: a simulation, and how well it serves the goal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from llm_serving.config.schema import ServingConfig
from llm_serving.errors import ConfigError

from llm_serving_simulator.figures import Figures, figures_of
from llm_serving_simulator.load import Load
from llm_serving_simulator.profile import Profile
from llm_serving_simulator.simulation import Result, Simulation
from llm_serving_simulator.tuner.goal import Goal
from llm_serving_simulator.tuner.hopeless import Hopeless
from llm_serving_simulator.tuner.knobs import Changes

UNUSABLE: Final = -1e9
"""Score of a configuration that is refused: below that of any that breaks constraints, however many."""

Configure = Callable[[Changes], ServingConfig]
"""The configuration to begin with, changed; raises ConfigError."""


class Trial(NamedTuple):
    changes: Changes
    score: float
    """Of the goal: below 0 with a constraint broken."""
    figures: Figures
    """Empty where the configuration was refused, of what had come where it was given up."""
    result: Result | None = None
    """But for what came of each request: that of all trials would take much memory."""

    @property
    def feasible(self) -> bool:
        return self.score >= 0


@dataclass
class Trials:
    """Simulates configurations, each once; what came of each request is forgotten, and simulated again by `whole`.

    Args:
        configure: Makes a configuration of changes.
        load: What comes.
        profile: What takes how long.
        goal: What is wanted.
        seed: Of the simulations.

    Raises:
        ConfigError: The configuration to begin with cannot be simulated.
    """

    configure: Configure
    load: Load
    profile: Profile
    goal: Goal
    seed: int = 1

    def __post_init__(self) -> None:
        self._done: dict[frozenset[tuple[str, object]], Trial] = {}
        self._feasible = False
        result = self._play(self.configure({})).run()
        figures = figures_of(result)
        self._longest_s = max(each.end_s for each in result.outcomes)
        self.own = self._keep(Trial({}, self.goal.score(figures, figures), figures, result))
        """The configuration to begin with."""

    def of(self, changes: Changes, *, to_the_end: bool = False) -> Trial:
        """What these changes come to; those that cannot lead anywhere are given up on the way.

        Args:
            changes: Of the configuration to begin with.
            to_the_end: Whether all figures are wanted, however bad they are.
        """
        known = self._done.get(frozenset(changes.items()))
        if known is not None and (known.result is None or known.result.complete or not to_the_end):
            return known
        try:
            config = self.configure(changes)
        except ConfigError:
            return self._keep(Trial(changes, UNUSABLE, {}))
        hopeless = Hopeless(self.goal, self.load, config.request_classes, self._longest_s, strict=self._feasible)
        result = self._play(config).run() if to_the_end else self._play(config).run(hopeless)
        figures = figures_of(result)
        score = self.goal.score(figures, self.own.figures)
        if not result.complete:
            # Worse than any that kept all constraints, and the worse the more was left undone.
            undone = sum(not each.finish for each in result.outcomes) + self.load.num_requests - len(result.outcomes)
            score = min(score, 0.0) - 1.0 - undone / self.load.num_requests
        return self._keep(Trial(changes, score, figures, result))

    def whole(self, trial: Trial) -> Result:
        """All that comes of the changes of a trial that was not refused."""
        return self._play(self.configure(trial.changes)).run()

    def _play(self, config: ServingConfig) -> Simulation:
        return Simulation(config, self.load, self.profile, self.seed)

    def _keep(self, trial: Trial) -> Trial:
        if trial.result is not None:
            trial = trial._replace(result=replace(trial.result, outcomes=[], block_use=[]))
        self._done[frozenset(trial.changes.items())] = trial
        self._feasible = self._feasible or trial.feasible
        return trial
