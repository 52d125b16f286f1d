"""`llm-serving tune`: looks for the configuration that serves a goal best, in simulations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_serving.cli.arguments import EXIT_FAILED, check_out, say
from llm_serving.config import ServingConfig
from llm_serving.errors import ConfigError
from llm_serving.hub.base import Progress

from llm_serving_simulator.commands.whatif import add_load_arguments, check_served, read_with

if TYPE_CHECKING:
    from llm_serving_simulator.tuner.ablation import Effect
    from llm_serving_simulator.tuner.goal import Goal
    from llm_serving_simulator.tuner.knobs import Changes, Knob
    from llm_serving_simulator.tuner.trial import Trial, Trials

NUM_TRIALS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="YAML", help="to begin with")
    parser.add_argument("--goal", type=Path, required=True, metavar="FILE", help="what is wanted (docs/tuning.md)")
    add_load_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="YAML", help="where the tuned configuration goes")
    parser.add_argument("--trials", type=int, default=NUM_TRIALS, metavar="N", help=f"default {NUM_TRIALS}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1: the goal cannot be reached; then the nearest configuration is written."""
    from llm_serving_simulator.profile import read_profile
    from llm_serving_simulator.reading import check_model, read_load
    from llm_serving_simulator.report import mark
    from llm_serving_simulator.tuner.ablation import effects, put_back
    from llm_serving_simulator.tuner.goal import read_goal
    from llm_serving_simulator.tuner.knobs import classes_in, knobs_for, left_out, tenants_in
    from llm_serving_simulator.tuner.search import search
    from llm_serving_simulator.tuner.tpe import TreeParzen
    from llm_serving_simulator.tuner.trial import Trials

    if arguments.trials < 1:
        raise ConfigError(f"--trials must be at least 1. Given: {arguments.trials}")
    check_out(arguments.out, arguments.config, arguments.goal, arguments.load, arguments.profile)
    goal, profile = read_goal(arguments.goal), read_profile(arguments.profile)
    load, configure = read_load(arguments.load, arguments.load_seed), _Configure(arguments.config, arguments.model)
    for line in load.notices:
        say(line)
    config = configure({})
    check_model(arguments.load, load, config)
    goal.check_groups(classes_in(config, load), tenants_in(load))
    knobs = knobs_for(config, load, goal, profile.blocks_of(config.pa.block_size), profile.reach)
    for line in left_out(profile.reach):
        say(line)
    trials = Trials(configure, load, profile, goal, arguments.seed)
    if trials.own.result is not None:
        check_served(str(arguments.config), trials.own.result, arguments.load, load)
    sampler = TreeParzen(knobs, arguments.seed, arguments.trials)
    say(f"{goal}; {len(knobs)} knobs, {load.num_requests:,} requests, {mark(profile)}")
    with _Bar(goal, arguments.trials) as bar:
        best = search(trials, knobs, sampler, arguments.trials, bar.tried)
    say("taking back what brings nothing")
    tuned = trials.of(put_back(trials, best).changes, to_the_end=True)
    found = effects(trials, tuned, {each.key: each.own_value for each in knobs})
    _write(arguments.config, arguments.out, arguments.model, trials, tuned, found)
    _show(arguments, trials, tuned, found)
    if tuned.feasible:
        return 0
    _say_what_limits(trials, tuned, knobs)
    return EXIT_FAILED


@dataclass(frozen=True)
class _Configure:
    """The configuration of a file, changed."""

    path: Path
    model: str | None

    def __call__(self, changes: Changes) -> ServingConfig:
        from llm_serving_simulator.tuner.knobs import as_overrides

        return read_with(self.path, as_overrides(changes), self.model)


class _Bar(Progress):
    """How far the search is, with the best so far."""

    def __init__(self, goal: Goal, num_trials: int) -> None:
        super().__init__(total=num_trials, unit="trial", desc="tuning")
        self._goal = goal

    def tried(self, trial: Trial, best: Trial) -> None:
        from llm_serving_simulator.report import number

        key = self._goal.objective.key
        broken = [each.figure.key for each in self._goal.constraints if not each.kept(best.figures)]
        shown = [f"{each} {number(each, best.figures.get(each, float('nan')))}" for each in broken or [key]]
        self.set_postfix_str(f"best {', '.join(shown)}{' (not kept yet)' if broken else ''}", refresh=False)
        self.update()


def _write(source: Path, out: Path, model: str | None, trials: Trials, tuned: Trial, effects: Sequence[Effect]) -> None:
    """Writes the tuned YAML, and reads it again: it must say what was simulated."""
    from llm_serving_simulator.out_file import write_out
    from llm_serving_simulator.tuner.tuned_yaml import differences, tuned_yaml

    write_out(out, tuned_yaml(source, trials.configure({}), trials, tuned, effects))
    if found := differences(read_with(out, [], model), trials.configure(tuned.changes)):
        raise ConfigError(
            f"{out}: does not say what was simulated of {', '.join(found)}: write it into the folder of {source}, "
            f"whose paths it has, or write the keys without anchors"
        )


def _show(arguments: argparse.Namespace, trials: Trials, tuned: Trial, effects: Sequence[Effect]) -> None:
    from llm_serving_simulator.report import table
    from llm_serving_simulator.tuner.knobs import yaml_text

    columns = []
    for name, trial in ((arguments.config.stem, trials.own), (arguments.out.stem, tuned)):
        result = trials.whole(trial)
        result.name = name
        columns.append((result, trial.figures))
    print(table(columns))
    for each in effects:
        print(f"{each.key}: {yaml_text(each.was)} -> {yaml_text(each.value)}: {each.brings(trials.goal, tuned)}")
    print(f"{arguments.out}: {len(effects)} keys changed")


def _say_what_limits(trials: Trials, tuned: Trial, knobs: Sequence[Knob]) -> None:
    from llm_serving_simulator.tuner.limits import limits, reliefs, told

    for each in trials.goal.constraints:
        if not each.kept(tuned.figures):
            print(f"NOT REACHED: {each} (with a margin of {each.margin:.0%})")
    for line in limits(tuned, knobs):
        print(f"  {line}")
    print("what would have to change, one thing at a time:")
    for relief in reliefs(trials, tuned):
        print(f"  {told(trials, relief)}")
