"""What `llm-serving whatif` predicts beside what the server does: configurations x loads, each load played on both.

    .venv/bin/python performance/whatif_scorecard.py --profile profile.json --keep measured/
    .venv/bin/python performance/whatif_scorecard.py --profile profile.json --keep again/ --measure-only
    .venv/bin/python performance/whatif_scorecard.py --profile other.json --against measured/ again/

The last of these measures nothing. Per configuration one server; on it, one after the other: a light load, as many
clients as slots, and more than the server can do with classes and tenants. Lengths, arrivals and tokens are drawn by a
seed; rates and numbers of requests follow from the capacity that the profile predicts, so that a cell takes some
`--seconds`, a light one four times as many, as medians of few requests tell little. Figures are those of `whatif`,
counted alike from what clients saw and from the simulation. Of several measurements of the same loads the median
counts, and how far they lie apart is told: no prediction can be closer.

What is off because the machine was faster or slower than when it was profiled is told apart from what the model gets
wrong: the last column has by what factor steps took longer during the load than the profile says of their shapes, by
the servers' recordings, and how many figures are within their limits with steps as fast as that is told, too. The
recordings also tell what was answered: drafts are simulated in those texts.
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
from llm_serving.cli.disturbance import MOST, Disturbance
from llm_serving.cli.own_server import own_server
from llm_serving.config import ServingConfig, load_config
from llm_serving.whatif.cost_model import CostModel
from llm_serving.whatif.figures import Figures, figures_of
from llm_serving.whatif.http_player import play
from llm_serving.whatif.load import Load
from llm_serving.whatif.measured_steps import MeasuredStep, Timings, read_timings
from llm_serving.whatif.outcome import Outcome
from llm_serving.whatif.profile import Profile, read_profile
from llm_serving.whatif.recorded_load import read_recorded, recording_files
from llm_serving.whatif.simulation import Result, Simulation
from llm_serving.whatif.workload import read_workload

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
"""Of the capacity."""
LIGHT_TIMES: Final = 4
"""As long as the others: of some 40 to 80 requests one more or less that has to wait counts little."""
OVERLOAD: Final = 1.4
"""Of the capacity."""
WITHIN: Final = {
    "output_tokens_per_s": 0.10,
    "ttft_p50_ms": 0.10,
    "tpot_p50_ms": 0.10,
    "ttft_p99_ms": 0.25,
    "tpot_p99_ms": 0.25,
}
"""How far each figure may be off."""
PAUSE_S: Final = 0.3
"""Between two loads."""
VOCAB_SIZE: Final = 1024
"""Of all loads."""
SIMULATIONS: Final = 5
"""Of which a prediction is the median: where a median lies between two groups of requests, one alone is chance."""
TRIAL_REQUESTS: Final = 6
"""For each slot, of the simulation that tells the capacity."""


@dataclass(frozen=True)
class Cell:
    config: str
    load: str


class Row(NamedTuple):
    cell: Cell
    runs: Sequence[Figures]
    """Measured, one after the other."""
    predicted: Figures
    slowness: float
    """Seconds that steps took in the median run, over what the profile says of their shapes."""
    at_that_speed: Figures
    """Predicted with steps that take so much longer."""

    def measured(self, name: str) -> float:
        """Median of all runs."""
        return statistics.median(each[name] for each in self.runs)

    def ok(self, name: str, predicted: Figures | None = None) -> bool:
        """Whether this, or some other prediction, is within its limits."""
        return _error((predicted or self.predicted)[name], self.measured(name)) <= WITHIN[name]

    def spread(self, name: str) -> float:
        """Of the runs: from the lowest to the highest, relative to their median."""
        values = [each[name] for each in self.runs]
        return (max(values) - min(values)) / self.measured(name)

    def repeats(self, name: str) -> bool:
        """Whether the last run is within the same limits of the first."""
        return _error(self.runs[-1][name], self.runs[0][name]) <= WITHIN[name]

    def in_range(self, name: str) -> bool:
        """Whether the prediction is within its limits of some run, or between two."""
        values, within = [each[name] for each in self.runs], WITHIN[name]
        return min(values) * (1 - within) <= self.predicted[name] <= max(values) * (1 + within)


def _error(value: float, of: float) -> float:
    """Relative; infinite where only one of them is known."""
    if math.isnan(value) and math.isnan(of):
        return 0.0
    return abs(value / of - 1) if of > 0 and not math.isnan(value) else math.inf


def workload(kind: str, slots: int, per_s: float, seconds: float, seed: int) -> str:
    """A workload file.

    Args:
        kind: One of `LOADS`.
        slots: Of the configuration.
        per_s: Requests a second that it can answer.
        seconds: That the load is to take, a light one `LIGHT_TIMES` as long.
        seed: Of what is drawn.
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
    """Writes the loads of a configuration."""
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
    """Plays the loads of one configuration on a server of its own; keeps what clients saw, and its recordings."""
    folder: Path = arguments.keep
    settings = CONFIGS[name]
    cells = list(cells_of(name, load_config(arguments.config, settings), profile, arguments))
    with own_server(arguments.config, settings, None, (folder / name).resolve()) as config:
        classes = config.request_classes
        warm = read_workload(path_of(folder, cells[0], "yaml"), 99)
        uvloop.run(play(config.serving.url, warm, classes, "warm", min(1.5, arguments.seconds)))
        for cell in cells:
            load = read_workload(path_of(folder, cell, "yaml"))
            for attempt in range(arguments.attempts):
                time.sleep(PAUSE_S)
                watch = Disturbance()
                salt = f"{cell.load} {attempt}"  # loads of one seed begin with the same prompts
                played = uvloop.run(play(config.serving.url, load, classes, name_of(cell), salt=salt))
                share = watch.share()
                if share <= MOST:
                    break
                sys.stderr.write(f"{cell.load}: other programs took {share:.0%} of the processors\n")
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
        runs.append(figures_of(Result("measured", load.name, profile, outcomes)))
    return Row(cell, runs, predicted, slowness, at_that_speed)


def predict(config: ServingConfig, load: Load, profile: Profile, seed: int) -> Figures:
    """Medians of several simulations: by how much each step differs from its kind is left to chance."""
    runs = [figures_of(Simulation(config, load, profile, each).run()) for each in range(seed, seed + SIMULATIONS)]
    return {name: statistics.median(each[name] for each in runs) for name in runs[0]}


@functools.cache
def answers_of(folder: Path) -> dict[tuple[int, ...], Sequence[int]]:
    """By prompt, the longest answer of a recording."""
    requests = [each for stream in read_recorded(folder).streams for each in stream.requests]
    ordered = sorted(requests, key=lambda each: len(each.answer_token_ids))
    return {tuple(each.prompt_token_ids): each.answer_token_ids for each in ordered}


def with_texts(load: Load, answers: Mapping[tuple[int, ...], Sequence[int]]) -> Load:
    """The load with its answers, in which a server finds its drafts."""
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
    """What ids of its requests begin with."""
    return cell.load.replace(" ", "-")


def slowness_of(cell: Cell, timings: Timings, profile: Profile) -> float:
    """Measured over predicted seconds of all steps during a load."""
    steps = steps_of(name_of(cell), timings)
    return sum(each.seconds for each in steps) / sum(predicted_s(each, profile) for each in steps)


def predicted_s(step: MeasuredStep, profile: Profile) -> float:
    """Of a step that was not formed ahead, with what forming it takes."""
    return profile.step.seconds(step.shape) + (0.0 if step.ahead else profile.form.seconds(step.shape))


def slowed(profile: Profile, factor: float) -> Profile:
    """With steps that take so much longer."""
    pieces = tuple(replace(each, seconds=factor * each.seconds) for each in profile.step.pieces)
    return replace(profile, step=CostModel(pieces))


def steps_of(name: str, timings: Timings) -> list[MeasuredStep]:
    """During the requests whose ids begin with a name, the last time that they were played."""
    prefix = f"{name}-"
    begins = max((time for each, time in timings.arrivals.items() if each.startswith(f"{prefix}0-")), default=math.inf)
    ends = max((times[-1] for each, times in timings.replies.items() if each.startswith(prefix)), default=-math.inf)
    return [each for each in timings.steps if begins <= each.began_s and each.replied_s <= ends]


def table(rows: Sequence[Row]) -> str:
    """Predicted / measured and the error of each figure; an exclamation mark where it is off by more than it may be."""
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
    told = [
        f"{name}: {sum(row.ok(name) for row in rows)} of {len(rows)} within {most:.0%}" for name, most in WITHIN.items()
    ]
    count = len(rows) * len(WITHIN)
    told.append(f"in all {sum(row.ok(name) for row in rows for name in WITHIN)} of {count}")
    at_that_speed = sum(row.ok(name, row.at_that_speed) for row in rows for name in WITHIN)
    told.append(f"with steps as fast as they were during each load: {at_that_speed} of {count}")
    if again:
        repeats = sum(row.repeats(name) for row in rows for name in WITHIN)
        in_range = sum(row.in_range(name) for row in rows for name in WITHIN)
        told.append(f"measured again: {repeats} of {count} within the same limits of the first measurement")
        told.append(f"predicted within these limits of one measurement, or between two: {in_range} of {count}")
    return f"{text}\n\n" + "; ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True, help="of `llm-serving profile` on this machine")
    parser.add_argument("--config", type=Path, default=Path("configs/demo_cpu.yaml"), help="serving YAML to vary")
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="of the configurations")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS, help="of the loads")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a load (default: 6)")
    parser.add_argument("--seed", type=int, default=1, help="of loads and simulation (default: 1)")
    parser.add_argument(
        "--attempts", type=int, default=3, help="to play a load while no other programs take processors (default: 3)"
    )
    parser.add_argument("--keep", type=Path, default=Path("scorecard"), help="folder for what was measured")
    parser.add_argument("--measure-only", action="store_true", help="keep what was measured; compare it later")
    parser.add_argument(
        "--against", type=Path, nargs="+", help="folders of earlier runs of the same loads: nothing is measured"
    )
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    sys.exit(main())
