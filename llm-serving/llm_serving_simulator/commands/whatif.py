"""`llm-serving whatif`: simulate configurations on a workload."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from llm_serving.cli.arguments import say
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import ConfigError

from llm_serving_simulator.arguments import check_out, seed
from llm_serving_simulator.figures import Capacity, SimulationResult, figures_of, highest_rate, offered_rate
from llm_serving_simulator.files import write_file
from llm_serving_simulator.profile import Profile, extrapolation_notices, read_profile
from llm_serving_simulator.recordings import check_vocabulary, load_workload
from llm_serving_simulator.report import as_json, format_figure, profile_source, pyplot, table, write_svg
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.tuner.problem import (
    Changes,
    Figure,
    FigureConstraint,
    TuningObjective,
    as_overrides,
    classes_in,
    parse_constraint,
    tenants_in,
)
from llm_serving_simulator.tuner.trial import TrialRunner, what_would_meet
from llm_serving_simulator.workload import Workload

PROFILE_CHANGE: Final = "@profile="


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="CONFIG",
        help="serving YAML; +SECTION.KEY=VALUE behind it changes a key: my.yaml+model_config.decode_batch_size=32;"
        " +@profile=FILE: its own profile, in place of --profile",
    )
    add_workload_arguments(parser)
    parser.add_argument(
        "--find-rate", action="store_true", help="also the highest rate at which each meets the objectives"
    )
    parser.add_argument(
        "--kept", type=float, default=0.99, metavar="SHARE", help="of requests, for --find-rate; default 0.99"
    )
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        metavar="FIGURE=LIMIT",
        help="also which changes would meet it: 'tenant alice.ttft_p99_ms=1000'; may be given several times",
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="all figures; - is standard output, with nothing else on it"
    )
    parser.add_argument("--svg", type=Path, metavar="OUT", help="a plot; wants matplotlib")
    parser.set_defaults(run=run)


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command that simulates."""
    parser.add_argument(
        "--load", type=Path, required=True, metavar="FILE", help="workload (*.yaml) or recording (*.rec, or a folder)"
    )
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="profile written by `llm-serving profile`"
    )
    parser.add_argument("--model", metavar="MODEL", help="in place of that of the configurations; none: without one")
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="of the simulation; default 1")
    parser.add_argument("--load-seed", type=seed, metavar="N", help="in place of the workload's own")


@dataclass(frozen=True)
class Variant:
    """A configuration with its profile; calling it simulates a workload."""

    name: str
    config: ServingConfig
    profile: Profile
    seed: int
    argument: str
    """The command-line argument that describes the variant."""

    def __call__(self, workload: Workload) -> SimulationResult:
        return Simulation(self.config, workload, self.profile, self.seed, self.name).run()


def read_variant(argument: str, model: str | None, profile: Profile, seed: int) -> Variant:
    """Return the variant `FILE+SECTION.KEY=VALUE+..`, with its own profile if it has `+@profile=FILE`. Raise
    ConfigError if a file cannot be read, or a value breaks a rule.
    """
    path, changes, profiles = _parts(argument)
    if path is None or Path() in profiles:
        rule = f"must be FILE, FILE+SECTION.KEY=VALUE or FILE+{PROFILE_CHANGE}FILE"
        raise ConfigError(f"CONFIG {rule}. Given: {argument!r}")
    try:
        config = read_with(path, changes, model)
    except ConfigError as error:
        if "+" not in argument:
            raise
        raise ConfigError(f"{argument}: {error}") from None
    return Variant(_short(argument), config, read_profile(profiles[-1]) if profiles else profile, seed, argument)


def read_with(path: Path, overrides: Sequence[str], model: str | None) -> ServingConfig:
    """Return the configuration of a file with "section.key=value" each, and the model of `--model`, or raise
    ConfigError.
    """
    if model == "none":
        return load_config(path, [*overrides, "model_config.model_path=null"])
    return load_config(path, overrides, model)


def run(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.kept <= 1:
        raise ConfigError(f"--kept must be above 0 and at most 1. Given: {arguments.kept:g}")
    needs = [parse_constraint(each, "--need") for each in arguments.need]
    _check_outputs(arguments)
    profile = read_profile(arguments.profile)
    workload = load_workload(arguments.load, arguments.load_seed)
    for line in workload.notices:
        say(line)
    if arguments.find_rate and not offered_rate(workload) > 0:
        raise ConfigError(f"{arguments.load}: --find-rate must have requests that come at a `rate`, not all at once")
    variants = _unique([read_variant(each, arguments.model, profile, arguments.seed) for each in arguments.configs])
    for each in variants:
        check_vocabulary(arguments.load, workload, each.config)
    for line in dict.fromkeys(profile_source(each.profile) for each in variants):
        say(line)
    results = []
    for variant in variants:
        start_s = time.perf_counter()
        result = variant(workload)
        check_servable(variant.argument, result, arguments.load, workload)
        seconds, figures = time.perf_counter() - start_s, figures_of(result)
        results.append((result, figures))
        speed = figures["duration_s"] / max(seconds, 1e-9)
        took = f"{figures['duration_s']:.1f} s in {seconds:.1f} s ({speed:,.0f} x)"
        say(f"{variant.name}: {workload.num_requests:,} requests, {took}")
    to_stdout = str(arguments.json) == "-"
    show: Callable[[str], object] = (lambda text: None) if to_stdout else partial(print, flush=True)
    show(table(results))
    if arguments.svg is not None:
        write_svg(results, arguments.svg)
    capacities = [highest_rate(workload, each, arguments.kept) for each in variants] if arguments.find_rate else []
    if capacities:
        show(_capacities(list(zip(variants, capacities, strict=True)), arguments.kept))
    answers = []
    for variant in variants if needs else ():
        show(f"{variant.name}:")
        answers.append(_answer_needs(variant, workload, arguments.model, needs, show))
    if to_stdout:
        print(as_json(results, capacities, answers))
    elif arguments.json is not None:
        write_file(arguments.json, as_json(results, capacities, answers) + "\n")
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raise ConfigError before the simulation if an output cannot be written, or would replace an input."""
    inputs = arguments.load, arguments.profile, *input_files(arguments.configs)
    if arguments.json is not None and str(arguments.json) != "-":
        check_out(arguments.json, *inputs)
    if arguments.svg is not None:
        check_out(arguments.svg, *inputs)
        if arguments.json is not None and arguments.json.resolve() == arguments.svg.resolve():
            raise ConfigError(f"--svg must be another file than --json. Given: {arguments.svg}")
        pyplot()


def input_files(configs: Sequence[str]) -> Iterator[Path]:
    """Yield the YAMLs and profiles that CONFIG arguments name."""
    for argument in configs:
        path, _, profiles = _parts(argument)
        yield from (each for each in (path, *profiles) if each is not None)


def _parts(argument: str) -> tuple[Path | None, list[str], list[Path]]:
    """Return the file of a CONFIG argument (None: missing), its changed keys and its profiles."""
    name, changes = _split(argument)
    profiles = [Path(each.removeprefix(PROFILE_CHANGE)) for each in changes if each.startswith(PROFILE_CHANGE)]
    keys = [each for each in changes if not each.startswith(PROFILE_CHANGE)]
    return Path(name) if name else None, keys, profiles


def _split(argument: str) -> tuple[str, list[str]]:
    """Return the file name of a CONFIG argument and its changes. The name of an existing file may contain "+"."""
    parts = argument.split("+")
    names = {end: "+".join(parts[:end]) for end in range(len(parts), 1, -1)}
    # os.path.isfile returns False for a name that is too long; Path.is_file raises OSError.
    end = next((end for end, name in names.items() if os.path.isfile(name)), 1)  # noqa: PTH113
    return "+".join(parts[:end]), parts[end:]


def check_servable(config: str, result: SimulationResult, path: Path, workload: Workload) -> None:
    """Report requests that a configuration can never serve. Raise ConfigError if it can serve none."""
    num, num_all = result.num_unservable, workload.num_requests
    if not num:
        return
    if num == num_all:
        raise ConfigError(f"{config}: can never serve any of the {num_all:,} requests of {path}: {result.unservable}")
    say(f"{config}: can never serve {num:,} of the {num_all:,} requests of {path}: {result.unservable}")


def _answer_needs(
    variant: Variant,
    workload: Workload,
    model: str | None,
    needs: Sequence[FigureConstraint],
    show: Callable[[str], object],
) -> list[str]:
    """Return the lines with changes that meet the constraints; show each line as soon as it is known."""
    path, own_changes, _ = _parts(variant.argument)
    assert path is not None

    def configure(changes: Changes) -> ServingConfig:
        return read_with(path, [*own_changes, *as_overrides(changes)], model)

    objective = TuningObjective(Figure("", "goodput_per_s"), maximize=True, constraints=tuple(needs))
    objective.check_groups(classes_in(variant.config, workload), tenants_in(workload))
    lines = []
    for line in what_would_meet(TrialRunner(configure, workload, variant.profile, objective, variant.seed)):
        show(f"  {line}")
        lines.append(line)
    return lines


def _capacities(found: Sequence[tuple[Variant, Capacity]], min_share: float) -> str:
    """Return a line for each variant: its highest rate, and the ratio to that of the first variant."""
    lines = [f"requests/s that meet the objectives of {min_share:.0%}:"]
    first = found[0][1].requests_per_s
    if not all(capacity.is_highest for _, capacity in found):
        lines.append("  (`at least`: the workload is too short to find the highest rate; add more `requests`)")
    for variant, capacity in found:
        ttft = format_figure("ttft_p99_ms", capacity.figures["ttft_p99_ms"])
        ratio = f"{capacity.requests_per_s / first:.2f} x the first" if first > 0 else "the first keeps none"
        least = "" if capacity.is_highest else "at least "
        rate = f"{least}{capacity.requests_per_s:.3g} ({capacity.factor:.3g} x the load's, {ratio})"
        notice = extrapolation_notices(capacity.result.notices)
        source = f"{profile_source(variant.profile)}{f'; {notice}' if notice else ''}"
        lines.append(f"  {variant.name}: {rate}, then TTFT p99 {ttft} ms; {source}")
    return "\n".join(lines)


def _unique(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants, those of the same name with their whole argument as name."""
    counts = Counter(each.name for each in variants)
    return [replace(each, name=each.argument) if counts[each.name] > 1 else each for each in variants]


def _short(argument: str) -> str:
    """Return a CONFIG argument without folders and sections of keys."""
    name, changes = _split(argument)
    return "+".join([Path(name).stem, *map(_short_change, changes)])


def _short_change(change: str) -> str:
    key, _, value = change.partition("=")
    return f"profile={Path(value).stem}" if change.startswith(PROFILE_CHANGE) else f"{key.partition('.')[2]}={value}"
