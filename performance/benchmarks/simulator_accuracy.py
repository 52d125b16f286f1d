"""Predictions of `llm-serving whatif` compared with measurements of the server.

    python performance/run.py simulator_accuracy --profile profile.json --keep measured/
    python performance/run.py simulator_accuracy --profile profile.json --keep again/ --measure-only
    python performance/run.py simulator_accuracy --profile other.json --against measured/ again/

The last command measures nothing. One server is started for each configuration. It is loaded in turn with a light load,
with as many clients as slots, and with more than it can serve, in classes and tenants. The seed decides lengths,
arrivals and tokens. Rates and request counts follow from the capacity that the profile predicts, so that a load takes
about `--seconds` (a light one four times as long, because medians of few requests are noisy). The figures are those of
`whatif`, computed alike from the clients' records and from the simulation. Several measurements of the same loads are
shown by their median and their range: no prediction can be closer than that range.

Errors that come from a faster or slower machine are separated from errors of the simulator. The last column is the
factor by which steps took longer during the load than the profile says, from the servers' recordings; the number of
figures within their limits at that step speed is reported too. The recordings also hold the generated tokens, which
the simulation of speculative decoding needs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
from llm_serving.config import ServingConfig, load_config
from llm_serving_simulator.figures import Figures, Outcome, SimulationResult, figures_of
from llm_serving_simulator.http_player import MAX_INTERFERENCE, CpuInterference, play, temporary_server
from llm_serving_simulator.profile import CostModel, Profile, read_profile
from llm_serving_simulator.recordings import MeasuredStep, Timings, read_recorded, read_timings, recording_files
from llm_serving_simulator.simulation import Simulation
from llm_serving_simulator.workload import Workload, read_workload

CONFIGS: Final = {
    "default": [],
    "16 slots": ["model_config.decode_batch_size=16"],
    "4 slots": ["model_config.decode_batch_size=4"],
    "128 tokens a step": ["scheduler_config.max_prefill_tokens=128"],
    "decode first": ["scheduler_config.policy=decode_first", "model_config.decode_batch_size=32"],
    "mixed": ["scheduler_config.policy=mixed", "model_config.decode_batch_size=64"],
    "small cache": ["pa_config.num_blocks=160", "model_config.decode_batch_size=32"],
    "not ahead": ["scheduler_config.async_scheduling=False", "model_config.decode_batch_size=32"],
}
LOADS: Final = ("light", "at capacity", "overload")
LENGTHS: Final = "prompt_tokens: {median: 40, p99: 250}, answer_tokens: {median: 40, p99: 150}"
LIGHT: Final = 0.15
"""Share of the capacity."""
LIGHT_TIMES: Final = 4
"""Duration relative to the other loads, so that one waiting request more or less hardly changes a median."""
OVERLOAD: Final = 1.4
"""Share of the capacity."""
WITHIN: Final = {
    "output_tokens_per_s": 0.10,
    "ttft_p50_ms": 0.10,
    "tpot_p50_ms": 0.10,
    "ttft_p99_ms": 0.25,
    "tpot_p99_ms": 0.25,
}
"""Largest relative error of each figure."""
PAUSE_S: Final = 0.3
"""Seconds between two loads."""
VOCAB_SIZE: Final = 1024
SIMULATIONS: Final = 5
"""Simulations whose median is the prediction: one alone is chance if a median lies between two groups of requests."""
TRIAL_REQUESTS: Final = 6
"""Requests for each slot in the simulation that predicts the capacity."""


@dataclass(frozen=True)
class Cell:
    config: str
    load: str


class Row(NamedTuple):
    cell: Cell
    runs: Sequence[Figures]
    """Figures of consecutive runs."""
    predicted: Figures
    slowness: float
    """Measured over predicted seconds of all steps in the median run."""
    at_that_speed: Figures
    """Figures predicted with steps slowed down by that factor."""

    def measured(self, name: str) -> float:
        """Return the median of all runs."""
        return statistics.median(each[name] for each in self.runs)

    def ok(self, name: str, predicted: Figures | None = None) -> bool:
        """Return whether the prediction, or another one, is within the limits."""
        return _error((predicted or self.predicted)[name], self.measured(name)) <= WITHIN[name]

    def spread(self, name: str) -> float:
        """Return the range of the runs relative to their median."""
        values = [each[name] for each in self.runs]
        return (max(values) - min(values)) / self.measured(name)

    def repeats(self, name: str) -> bool:
        """Return whether the last run is within the same limits of the first."""
        return _error(self.runs[-1][name], self.runs[0][name]) <= WITHIN[name]

    def in_range(self, name: str) -> bool:
        """Return whether the prediction is within the limits of a run, or between two runs."""
        values, within = [each[name] for each in self.runs], WITHIN[name]
        return min(values) * (1 - within) <= self.predicted[name] <= max(values) * (1 + within)


def _error(value: float, of: float) -> float:
    """Return the relative error; infinite if only one of the values is known."""
    if math.isnan(value) and math.isnan(of):
        return 0.0
    return abs(value / of - 1) if of > 0 and not math.isnan(value) else math.inf


def workload(kind: str, slots: int, per_s: float, seconds: float, seed: int) -> str:
    """Return a workload file.

    Args:
        kind: One of `LOADS`.
        slots: Running slots of the configuration.
        per_s: Its capacity in requests per second.
        seconds: Duration of the load; a light one lasts `LIGHT_TIMES` as long.
        seed: Seed of arrivals, lengths and tokens.
    """
    head = f"seed: {seed}\nvocab_size: {VOCAB_SIZE}\nstreams:\n"
    if kind == "light":
        return f"{head}    all: {{rate: {LIGHT * per_s:.4g}, ends_s: {LIGHT_TIMES * seconds:g}, {LENGTHS}}}\n"
    if kind == "at capacity":
        count = max(2 * slots, round(seconds * per_s))
        return f"{head}    all: {{concurrency: {slots}, requests: {count}, {LENGTHS}}}\n"
    rate, ends = OVERLOAD * per_s, seconds / OVERLOAD
    return (
        f"{head}    people: {{rate: {0.4 * rate:.4g}, ends_s: {ends:g}, class: interactive, tenants: 3, {LENGTHS}}}\n"
        f"    rest: {{rate: {0.4 * rate:.4g}, ends_s: {ends:g}, tenants: {{big: 3, small: 1}}, {LENGTHS}}}\n"
        f"    bulk: {{rate: {0.2 * rate:.4g}, ends_s: {ends:g}, class: batch, {LENGTHS}}}\n"
    )


def cells_of(name: str, config: ServingConfig, profile: Profile, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Write the workload files of a configuration."""
    slots, folder = config.model.decode_batch_size, arguments.keep
    trial = folder / "trial.yaml"
    trial.write_text(
        workload("at capacity", slots, 0.0, 0.0, arguments.seed).replace(
            f"requests: {2 * slots}", f"requests: {max(40, TRIAL_REQUESTS * slots)}"
        )
    )
    per_s = figures_of(Simulation(config, read_workload(trial), profile).run())["requests_per_s"]
    for kind in LOADS:
        if kind in arguments.loads:
            cell = Cell(name, kind)
            path_of(folder, cell, "yaml").write_text(workload(kind, slots, per_s, arguments.seconds, arguments.seed))
            yield cell


def path_of(folder: Path, cell: Cell, suffix: str) -> Path:
    return folder / f"{cell.config}, {cell.load}.{suffix}"


def measure(name: str, arguments: argparse.Namespace, profile: Profile) -> None:
    """Run the loads of one configuration on a new server; keep the clients' records and the server's recordings."""
    folder: Path = arguments.keep
    settings = CONFIGS[name]
    cells = list(cells_of(name, load_config(arguments.config, settings), profile, arguments))
    with temporary_server(arguments.config, settings, None, (folder / name).resolve()) as config:
        classes = config.request_classes
        warm = read_workload(path_of(folder, cells[0], "yaml"), 99)
        uvloop.run(play(config.serving.url, warm, classes, "warm", min(1.5, arguments.seconds)))
        for cell in cells:
            load = read_workload(path_of(folder, cell, "yaml"))
            for attempt in range(arguments.attempts):
                time.sleep(PAUSE_S)
                watch = CpuInterference()
                salt = f"{cell.load} {attempt}"  # loads of one seed begin with the same prompts
                played = uvloop.run(play(config.serving.url, load, classes, name_of(cell), salt=salt))
                share = watch.share()
                if share <= MAX_INTERFERENCE:
                    break
                sys.stderr.write(f"{cell.load}: other programs used {share:.0%} of the processors\n")
            rows = [{**asdict(each), "request_class": each.request_class.name} for each in played.outcomes]
            path_of(folder, cell, "json").write_text(json.dumps(rows))


def compare(cell: Cell, folders: Sequence[Path], arguments: argparse.Namespace, profile: Profile) -> Row:
    config = load_config(arguments.config, CONFIGS[cell.config])
    load = with_texts(read_workload(path_of(folders[0], cell, "yaml")), answers_of(folders[0] / cell.config))
    timings = [read_timings(recording_files(folder / cell.config)) for folder in folders]
    slowness = statistics.median(slowness_of(cell, each, profile) for each in timings)
    predicted = predict(config, load, profile, arguments.seed)
    at_that_speed = predict(config, load, slowed(profile, slowness), arguments.seed)
    classes = {each.name: each for each in config.request_classes}
    runs = []
    for folder in folders:
        rows = json.loads(path_of(folder, cell, "json").read_text())
        outcomes = [Outcome(**{**each, "request_class": classes[each["request_class"]]}) for each in rows]
        runs.append(figures_of(SimulationResult("measured", load.name, profile, outcomes)))
    return Row(cell, runs, predicted, slowness, at_that_speed)


def predict(config: ServingConfig, load: Workload, profile: Profile, seed: int) -> Figures:
    """Return the medians of several simulations, whose step times vary at random."""
    runs = [figures_of(Simulation(config, load, profile, each).run()) for each in range(seed, seed + SIMULATIONS)]
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


@functools.cache
def answers_of(folder: Path) -> dict[tuple[int, ...], Sequence[int]]:
    """Return the longest answer to each prompt of a recording."""
    requests = [each for stream in read_recorded(folder).streams for each in stream.requests]
    ordered = sorted(requests, key=lambda each: len(each.answer_token_ids))
    return {tuple(each.prompt_token_ids): each.answer_token_ids for each in ordered}


def with_texts(load: Workload, answers: Mapping[tuple[int, ...], Sequence[int]]) -> Workload:
    """Return the workload with its recorded answers, from which the n-gram lookup proposes draft tokens."""
    streams = tuple(
        replace(
            stream,
            requests=[
                replace(each, answer_token_ids=answers.get(tuple(each.prompt_token_ids), ()))
                for each in stream.requests
            ],
        )
        for stream in load.streams
    )
    return replace(load, streams=streams)


def name_of(cell: Cell) -> str:
    """Return the prefix of the request ids of the load."""
    return cell.load.replace(" ", "-")


def slowness_of(cell: Cell, timings: Timings, profile: Profile) -> float:
    """Return the measured over the predicted seconds of all steps during a load."""
    steps = steps_of(name_of(cell), timings)
    return sum(each.seconds for each in steps) / sum(predicted_s(each, profile) for each in steps)


def predicted_s(step: MeasuredStep, profile: Profile) -> float:
    """Return the seconds of a step; a step that was not scheduled ahead includes the scheduling time."""
    return profile.step.seconds(step.shape) + (0.0 if step.ahead else profile.form.seconds(step.shape))


def slowed(profile: Profile, factor: float) -> Profile:
    pieces = tuple(replace(each, seconds=factor * each.seconds) for each in profile.step.terms)
    return replace(profile, step=CostModel(pieces))


def steps_of(name: str, timings: Timings) -> list[MeasuredStep]:
    """Return the steps during the last run of the requests whose ids start with a name."""
    prefix = f"{name}-"
    begins = max((time for each, time in timings.arrivals.items() if each.startswith(f"{prefix}0-")), default=math.inf)
    ends = max((times[-1] for each, times in timings.replies.items() if each.startswith(prefix)), default=-math.inf)
    return [each for each in timings.steps if begins <= each.start_s and each.reply_s <= ends]


def table(rows: Sequence[Row]) -> str:
    """Return a table of predicted and measured figures with their errors; an exclamation mark is beyond the limit."""
    titles = ["configuration", "load", "requests", "output tok/s", "TTFT p50 ms", "TPOT p50 ms", "TTFT p99 ms"]
    titles += ["TPOT p99 ms", "steps"]
    again = len(rows[0].runs) > 1 if rows else False
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        cells = [row.cell.config, row.cell.load, f"{row.predicted['requests']:.0f}"]
        for name in WITHIN:
            predicted, measured = row.predicted[name], row.measured(name)
            mark = "" if row.ok(name) else " !"
            sign = predicted / measured - 1 if measured else math.nan
            apart = f" ±{row.spread(name) / 2:.0%}" if again else ""
            cells.append(f"{predicted:.4g} / {measured:.4g}{apart} ({sign:+.0%}){mark}")
        lines.append([*cells, f"x {row.slowness:.2f}"])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    counts = [
        f"{name}: {sum(row.ok(name) for row in rows)} of {len(rows)} within {most:.0%}" for name, most in WITHIN.items()
    ]
    count = len(rows) * len(WITHIN)
    counts.append(f"in all {sum(row.ok(name) for row in rows for name in WITHIN)} of {count}")
    at_that_speed = sum(row.ok(name, row.at_that_speed) for row in rows for name in WITHIN)
    counts.append(f"with steps as fast as they were during each load: {at_that_speed} of {count}")
    if again:
        repeats = sum(row.repeats(name) for row in rows for name in WITHIN)
        in_range = sum(row.in_range(name) for row in rows for name in WITHIN)
        counts.append(f"measured again: {repeats} of {count} within the same limits of the first measurement")
        counts.append(f"predicted within these limits of one measurement, or between two: {in_range} of {count}")
    return f"{text}\n\n" + "; ".join(counts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--profile", type=Path, required=True, help="profile of this machine, from `llm-serving profile`"
    )
    parser.add_argument("--config", type=Path, default=Path("configs/demo_cpu.yaml"), help="serving YAML to vary")
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="configurations to measure")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS, help="loads to measure")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration of a load (default: 6)")
    parser.add_argument("--seed", type=int, default=1, help="seed of loads and simulations (default: 1)")
    parser.add_argument(
        "--attempts",
        type=int,
        default=3,
        help="attempts to measure a load without interference of other programs (default: 3)",
    )
    parser.add_argument("--keep", type=Path, default=Path("scorecard"), help="folder for the measurements")
    parser.add_argument("--measure-only", action="store_true", help="only measure; compare later")
    parser.add_argument(
        "--against", type=Path, nargs="+", help="folders of earlier runs of the same loads: nothing is measured"
    )
    arguments = parser.parse_args(argv)
    profile = read_profile(arguments.profile)
    folders: list[Path] = arguments.against or [arguments.keep]
    if arguments.against is None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        for name in arguments.only:
            sys.stderr.write(f"{name}\n")
            measure(name, arguments, profile)
    if arguments.measure_only:
        return 0
    cells = [Cell(name, kind) for name in arguments.only for kind in LOADS if kind in arguments.loads]
    measured = [cell for cell in cells if all(path_of(folder, cell, "json").exists() for folder in folders)]
    rows = [compare(cell, folders, arguments, profile) for cell in measured]
    sys.stdout.write(table(rows) + "\n")
    return 0
