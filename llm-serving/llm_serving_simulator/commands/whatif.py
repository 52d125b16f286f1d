"""`llm-serving whatif`: what configurations would have done to a load."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_serving.cli.arguments import check_out, say, seed
from llm_serving.config import ServingConfig, load_config
from llm_serving.errors import ConfigError

if TYPE_CHECKING:
    from llm_serving_simulator.capacity import Capacity
    from llm_serving_simulator.load import Load
    from llm_serving_simulator.profile import Profile
    from llm_serving_simulator.simulation import Result
    from llm_serving_simulator.tuner.goal import Constraint


OWN_PROFILE: Final = "@profile="


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "configs",
        nargs="+",
        metavar="CONFIG",
        help="serving YAML; +SECTION.KEY=VALUE behind it changes a key: my.yaml+model_config.decode_batch_size=32;"
        " +@profile=FILE: what takes how long there, in place of --profile",
    )
    add_load_arguments(parser)
    parser.add_argument("--find-rate", action="store_true", help="also the highest rate at which each keeps promises")
    parser.add_argument(
        "--kept", type=float, default=0.99, metavar="SHARE", help="of requests, for --find-rate; default 0.99"
    )
    parser.add_argument(
        "--need",
        action="append",
        default=[],
        metavar="FIGURE=LIMIT",
        help="also what would have to change to keep it: 'tenant alice.ttft_p99_ms=1000'; may be given several times",
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="all numbers; - is standard output, with nothing else on it"
    )
    parser.add_argument("--svg", type=Path, metavar="OUT", help="a plot; wants matplotlib")
    parser.set_defaults(run=run)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What every command takes that simulates."""
    parser.add_argument(
        "--load", type=Path, required=True, metavar="FILE", help="workload (*.yaml) or recording (*.rec, or a folder)"
    )
    parser.add_argument(
        "--profile", type=Path, required=True, metavar="FILE", help="what takes how long, of `llm-serving profile`"
    )
    parser.add_argument("--model", metavar="MODEL", help="in place of that of the configurations; none: without one")
    parser.add_argument("--seed", type=seed, default=1, metavar="N", help="of the simulation; default 1")
    parser.add_argument("--load-seed", type=seed, metavar="N", help="in place of the workload's own")


def read_variant(argument: str, model: str | None, profile: Profile, seed: int) -> Variant:
    """The configuration of `FILE+SECTION.KEY=VALUE+..`, and the profile of `+@profile=FILE` if it has one of its own.

    Raises:
        ConfigError: It cannot be read, or breaks a rule.
    """
    from llm_serving_simulator.profile import read_profile

    name, *changes = argument.split("+")
    if not name or OWN_PROFILE in changes:
        raise ConfigError(f"CONFIG must be FILE, FILE+SECTION.KEY=VALUE or FILE+{OWN_PROFILE}FILE. Given: {argument!r}")
    profiles = [each.removeprefix(OWN_PROFILE) for each in changes if each.startswith(OWN_PROFILE)]
    try:
        config = read_with(Path(name), [each for each in changes if not each.startswith(OWN_PROFILE)], model)
    except ConfigError as error:
        if not changes:
            raise
        raise ConfigError(f"{argument}: {error}") from None
    own_profile = read_profile(Path(profiles[-1])) if profiles else profile
    return Variant(_short(argument), config, own_profile, seed, argument)


def read_with(path: Path, overrides: Sequence[str], model: str | None) -> ServingConfig:
    """The configuration of a file with "section.key=value" each, and what `--model` says.

    Raises:
        ConfigError: It cannot be read, or breaks a rule.
    """
    if model == "none":
        return load_config(path, [*overrides, "model_config.model_path=null"])
    return load_config(path, overrides, model)


def run(arguments: argparse.Namespace) -> int:
    from llm_serving_simulator.capacity import highest_rate, offered_rate
    from llm_serving_simulator.figures import figures_of
    from llm_serving_simulator.out_file import write_out
    from llm_serving_simulator.profile import read_profile
    from llm_serving_simulator.reading import check_model, read_load
    from llm_serving_simulator.report import as_json, mark, table
    from llm_serving_simulator.tuner.goal import constraint

    if not 0 < arguments.kept <= 1:
        raise ConfigError(f"--kept must be above 0 and at most 1. Given: {arguments.kept:g}")
    needs = [constraint(each, "--need") for each in arguments.need]
    read = arguments.load, arguments.profile, *files_of(arguments.configs)
    if arguments.json is not None and str(arguments.json) != "-":
        check_out(arguments.json, *read)
    if arguments.svg is not None:
        from llm_serving_simulator.plots import check_plots, write_svg

        check_out(arguments.svg, *read)
        if arguments.json is not None and arguments.json.resolve() == arguments.svg.resolve():
            raise ConfigError(f"--svg must be another file than --json. Given: {arguments.svg}")
        check_plots()
    profile = read_profile(arguments.profile)
    load = read_load(arguments.load, arguments.load_seed)
    for line in load.notices:
        say(line)
    if arguments.find_rate and not offered_rate(load) > 0:
        raise ConfigError(f"{arguments.load}: --find-rate must have requests that come at a `rate`, not all at once")
    variants = _apart([read_variant(each, arguments.model, profile, arguments.seed) for each in arguments.configs])
    for each in variants:
        check_model(arguments.load, load, each.config)
    for line in dict.fromkeys(mark(each.profile) for each in variants):
        say(line)
    results = []
    for argument, variant in zip(arguments.configs, variants, strict=True):
        began = time.perf_counter()
        result = variant(load)
        check_served(argument, result, arguments.load, load)
        seconds, figures = time.perf_counter() - began, figures_of(result)
        results.append((result, figures))
        pace = figures["duration_s"] / max(seconds, 1e-9)
        took = f"{figures['duration_s']:.1f} s in {seconds:.1f} s ({pace:,.0f} x)"
        say(f"{variant.name}: {load.num_requests:,} requests, {took}")
    show = partial(print, flush=True) if str(arguments.json) != "-" else _show_nothing
    show(table(results))
    if arguments.svg is not None:
        write_svg(results, arguments.svg)
    capacities = [highest_rate(load, each, arguments.kept) for each in variants] if arguments.find_rate else []
    if capacities:
        show(_capacities(list(zip(variants, capacities, strict=True)), arguments.kept))
    told = []
    for argument, variant in zip(arguments.configs, variants, strict=True) if needs else ():
        show(f"{variant.name}:")
        told.append(_what_would_keep(argument, variant, load, arguments.model, needs, show))
    if str(arguments.json) == "-":
        print(as_json(results, capacities, told))
    elif arguments.json is not None:
        write_out(arguments.json, as_json(results, capacities, told) + "\n")
    return 0


def _show_nothing(text: str) -> None:
    """Standard output is for numbers."""


def files_of(configs: Sequence[str]) -> Iterator[Path]:
    """What these arguments have read: YAMLs, and profiles of their own."""
    for argument in configs:
        name, *changes = argument.split("+")
        yield Path(name)
        yield from (Path(each.removeprefix(OWN_PROFILE)) for each in changes if each.startswith(OWN_PROFILE))


def check_served(config: str, result: Result, path: Path, load: Load) -> None:
    """Tells of requests that a configuration can never serve.

    Raises:
        ConfigError: These are all.
    """
    num, num_all = result.num_unservable, load.num_requests
    if not num:
        return
    if num == num_all:
        raise ConfigError(f"{config}: can never serve any of the {num_all:,} requests of {path}: {result.unservable}")
    say(f"{config}: can never serve {num:,} of the {num_all:,} requests of {path}: {result.unservable}")


def _what_would_keep(
    argument: str,
    variant: Variant,
    load: Load,
    model: str | None,
    needs: Sequence[Constraint],
    show: Callable[[str], object],
) -> list[str]:
    """In lines, each of which is shown as soon as it is known."""
    from llm_serving_simulator.needs import what_would_keep
    from llm_serving_simulator.tuner.goal import Figure, Goal
    from llm_serving_simulator.tuner.knobs import Changes, as_overrides, classes_in, tenants_in
    from llm_serving_simulator.tuner.trial import Trials

    path, *changes = argument.split("+")
    own = [each for each in changes if not each.startswith(OWN_PROFILE)]

    def configure(changed: Changes) -> ServingConfig:
        return read_with(Path(path), [*own, *as_overrides(changed)], model)

    goal = Goal(Figure("", "goodput_per_s"), most=True, constraints=tuple(needs))
    goal.check_groups(classes_in(variant.config, load), tenants_in(load))
    lines = []
    for line in what_would_keep(Trials(configure, load, variant.profile, goal, variant.seed)):
        show(f"  {line}")
        lines.append(line)
    return lines


def _capacities(found: Sequence[tuple[Variant, Capacity]], kept_share: float) -> str:
    """A line each: the rate at which promises are kept, and what the first's is times it."""
    from llm_serving_simulator.reach import told_beyond
    from llm_serving_simulator.report import mark, number

    lines = [f"requests/s that keep the promises of {kept_share:.0%}:"]
    first = found[0][1].requests_per_s
    if not all(capacity.is_highest for _, capacity in found):
        lines.append("  (where it says `at least`, the load is over too soon: more `requests` would tell more)")
    for variant, capacity in found:
        ttft = number("ttft_p99_ms", capacity.figures["ttft_p99_ms"])
        beside = f"{capacity.requests_per_s / first:.2f} x the first" if first > 0 else "the first keeps none"
        least = "" if capacity.is_highest else "at least "
        rate = f"{least}{capacity.requests_per_s:.3g} ({capacity.factor:.3g} x the load's, {beside})"
        beyond = told_beyond(capacity.result.notices)
        told = f"{mark(variant.profile)}{f'; {beyond}' if beyond else ''}"
        lines.append(f"  {variant.name}: {rate}, then TTFT p99 {ttft} ms; {told}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Variant:
    """A configuration with what takes how long under it; plays loads."""

    name: str
    config: ServingConfig
    profile: Profile
    seed: int
    argument: str
    """That told of it."""

    def __call__(self, load: Load) -> Result:
        from llm_serving_simulator.simulation import Simulation

        return Simulation(self.config, load, self.profile, self.seed, self.name).run()


def _apart(variants: Sequence[Variant]) -> list[Variant]:
    """Those that would have the same name have all that told of them."""
    counts = Counter(each.name for each in variants)
    return [replace(each, name=each.argument) if counts[each.name] > 1 else each for each in variants]


def _short(argument: str) -> str:
    """The name of a configuration without folders and the sections of its keys."""
    name, *changes = argument.split("+")
    return "+".join([Path(name).stem, *map(_short_change, changes)])


def _short_change(change: str) -> str:
    key, _, value = change.partition("=")
    return f"profile={Path(value).stem}" if change.startswith(OWN_PROFILE) else f"{key.partition('.')[2]}={value}"
