"""`llm-serving tune`: search for the configuration that meets an objective best, in simulations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm_serving.cli.arguments import EXIT_FAILED, say
from llm_serving.config import ServingConfig
from llm_serving.errors import ConfigError
from llm_serving.hub.base import DownloadProgress

from llm_serving_simulator.arguments import check_out
from llm_serving_simulator.commands.whatif import add_workload_arguments, check_servable, read_with
from llm_serving_simulator.files import write_file
from llm_serving_simulator.profile import read_profile
from llm_serving_simulator.recordings import check_vocabulary, load_workload
from llm_serving_simulator.report import format_figure, profile_source, table
from llm_serving_simulator.tuner.problem import (
    Changes,
    SearchParameter,
    TuningObjective,
    as_overrides,
    classes_in,
    read_objective,
    search_space,
    tenants_in,
    unmeasured_values,
    yaml_text,
)
from llm_serving_simulator.tuner.search import Effect, TreeParzen, effects_of, revert_useless_changes, search
from llm_serving_simulator.tuner.trial import Trial, TrialRunner, described, improvements, limits
from llm_serving_simulator.tuner.yaml_writer import differences, tuned_yaml

NUM_TRIALS: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="YAML", help="configuration to start from")
    parser.add_argument(
        "--goal", type=Path, required=True, metavar="FILE", help="the objective (docs/guides/tuning.md)"
    )
    add_workload_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="YAML", help="file for the tuned configuration")
    parser.add_argument("--trials", type=int, default=NUM_TRIALS, metavar="N", help=f"default {NUM_TRIALS}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Tune and write the YAML; return 1 if it does not meet the objective."""
    if arguments.trials < 1:
        raise ConfigError(f"--trials must be at least 1. Given: {arguments.trials}")
    check_out(arguments.out, arguments.config, arguments.goal, arguments.load, arguments.profile)
    objective, profile = read_objective(arguments.goal), read_profile(arguments.profile)
    workload = load_workload(arguments.load, arguments.load_seed)
    configure = _Configure(arguments.config, arguments.model)
    for line in workload.notices:
        say(line)
    config = configure({})
    check_vocabulary(arguments.load, workload, config)
    objective.check_groups(classes_in(config, workload), tenants_in(workload))
    num_blocks = profile.blocks_of(config.pa.block_size)
    parameters = search_space(config, workload, objective, num_blocks, profile.measured_range)
    for line in unmeasured_values(profile.measured_range):
        say(line)
    trials = TrialRunner(configure, workload, profile, objective, arguments.seed)
    if trials.baseline.result is not None:
        check_servable(str(arguments.config), trials.baseline.result, arguments.load, workload)
    sampler = TreeParzen(parameters, arguments.seed, arguments.trials)
    say(f"{objective}; {len(parameters)} keys, {workload.num_requests:,} requests, {profile_source(profile)}")
    with _Bar(objective, arguments.trials) as bar:
        best = search(trials, parameters, sampler, arguments.trials, bar.on_trial)
    say("reverting changes that have no effect")
    tuned = trials.run(revert_useless_changes(trials, best).changes, to_the_end=True)
    effects = effects_of(trials, tuned, {each.key: each.current_value for each in parameters})
    _write(arguments.config, arguments.out, arguments.model, trials, tuned, effects)
    _show(arguments, trials, tuned, effects)
    if tuned.feasible:
        return 0
    _show_limits(trials, tuned, parameters)
    return EXIT_FAILED


@dataclass(frozen=True)
class _Configure:
    """Returns the configuration of a file with changes."""

    path: Path
    model: str | None

    def __call__(self, changes: Changes) -> ServingConfig:
        return read_with(self.path, as_overrides(changes), self.model)


class _Bar(DownloadProgress):
    """The progress bar of the search, with the figures of the best trial."""

    def __init__(self, objective: TuningObjective, num_trials: int) -> None:
        super().__init__(total=num_trials, unit="trial", desc="tuning")
        self._objective = objective

    def on_trial(self, trial: Trial, best: Trial) -> None:
        violated = [each.figure.key for each in self._objective.constraints if not each.is_met(best.figures)]
        keys = violated or [self._objective.figure.key]
        shown = ", ".join(f"{key} {format_figure(key, best.figures.get(key, float('nan')))}" for key in keys)
        self.set_postfix_str(f"best {shown}{' (not met yet)' if violated else ''}", refresh=False)
        self.update()


def _write(
    source: Path, out: Path, model: str | None, trials: TrialRunner, tuned: Trial, effects: Sequence[Effect]
) -> None:
    """Write the tuned YAML and read it again, to check that it is the configuration that was simulated."""
    write_file(out, tuned_yaml(source, trials.configure({}), trials, tuned, effects))
    if found := differences(read_with(out, [], model), trials.configure(tuned.changes)):
        raise ConfigError(
            f"{out}: differs from the simulated configuration in {', '.join(found)}: write it into the folder of "
            f"{source}, whose relative paths it has, or write the keys without anchors"
        )


def _show(arguments: argparse.Namespace, trials: TrialRunner, tuned: Trial, effects: Sequence[Effect]) -> None:
    columns = []
    for name, trial in ((arguments.config.stem, trials.baseline), (arguments.out.stem, tuned)):
        result = trials.full_result(trial)
        result.name = name
        columns.append((result, trial.figures))
    print(table(columns))
    for each in effects:
        benefit = each.benefit(trials.objective, tuned)
        print(f"{each.key}: {yaml_text(each.was)} -> {yaml_text(each.value)}: {benefit}")
    print(f"{arguments.out}: {len(effects)} keys changed")


def _show_limits(trials: TrialRunner, tuned: Trial, parameters: Sequence[SearchParameter]) -> None:
    for each in trials.objective.constraints:
        if not each.is_met(tuned.figures):
            print(f"NOT REACHED: {each} (with a margin of {each.margin:.0%})")
    for line in limits(tuned, parameters):
        print(f"  {line}")
    print("what would have to change, one thing at a time:")
    for improvement in improvements(trials, tuned):
        print(f"  {described(trials, improvement)}")
