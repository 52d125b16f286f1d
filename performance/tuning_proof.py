"""`llm-serving tune` on the real server: default, tuned and random YAMLs under the same loads, for three goals.

    .venv/bin/python performance/tuning_proof.py --profile profile.json --keep proof/ --tune-only
    .venv/bin/python performance/tuning_proof.py --profile profile.json --keep proof/               # on an idle machine

Each takes some minutes. The first tunes `--config` for each goal; the second starts a server for each YAML, plays the
goal's load on it over HTTP and compares what clients saw with what was predicted. What was measured already is kept;
`--only` names goals. Random YAMLs turn the knobs that `tune` turns, by `--seed`. How heavy a load is and what is asked
follow from what the profile predicts of `--config`, so that there is something to tune on fast machines and slow ones.
No server uses speculative decoding: the answers are in no workload file, so that no simulation could draft tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
from llm_serving.cli.arguments import EXIT_FAILED
from llm_serving.cli.main import main as llm_serving
from llm_serving.cli.own_server import own_server
from llm_serving.config import load_config
from llm_serving.errors import ConfigError
from llm_serving.whatif.figures import OF_GROUP, Figures, figures_of
from llm_serving.whatif.http_player import play
from llm_serving.whatif.load import Load
from llm_serving.whatif.out_file import write_out
from llm_serving.whatif.profile import Profile, read_profile
from llm_serving.whatif.report import number
from llm_serving.whatif.simulation import Result, Simulation
from llm_serving.whatif.tuning.goal import Constraint, Goal, read_goal
from llm_serving.whatif.tuning.knobs import as_overrides, knobs_for
from llm_serving.whatif.workload import read_workload


class Task(NamedTuple):
    """A goal and a load, as their files have them but for what depends on the machine.

    RATE stands for `OVERLOAD` times the requests a second that the configuration is predicted to answer, LIMIT for half
    of what it is predicted to have of the figure `halved`.
    """

    goal: str
    load: str
    halved: str = ""


LENGTHS: Final = "prompt_tokens: {median: 40, p99: 200}, answer_tokens: {median: 40, p99: 120}"
TASKS: Final = {
    "promises": Task(
        "most: goodput\n",
        f"streams:\n    people: {{rate: RATE, ends_s: 4, class: interactive, {LENGTHS}}}\n",
    ),
    "first tokens": Task(
        "constraints: {interactive.ttft_p50_ms: LIMIT}\nmost: output_tokens\n",
        "streams:\n    people: {rate: 12, ends_s: 3, class: interactive, prompt_tokens: 40, answer_tokens: 16}\n"
        "    bulk: {concurrency: 96, requests: 160, class: batch, prompt_tokens: 300, answer_tokens: 60}\n",
        halved="interactive.ttft_p50_ms",
    ),
    "smooth streams": Task(
        "constraints: {standard.ttft_p99_ms: 1500}\nleast: interactive.itl_p99_ms\n",
        "streams:\n    people: {concurrency: 8, requests: 24, class: interactive, prompt_tokens: 40,"
        " answer_tokens: 200}\n"
        "    prompts: {rate: 15, ends_s: 3, class: standard, prompt_tokens: 500, answer_tokens: 4}\n",
    ),
}
OVERLOAD: Final = 2.0
CLOSED: Final = f"streams:\n    all: {{concurrency: 128, requests: 600, class: interactive, {LENGTHS}}}\n"
"""What tells how many requests a second are answered at most."""
WARM: Final = f"streams:\n    all: {{concurrency: 16, requests: 48, {LENGTHS}}}\n"
VOCABULARY: Final = "vocab_size: 1024\n"
NO_SPECULATION: Final = ("scheduler_config.speculative_method=none",)
"""Of servers and simulations."""
DEFAULT, TUNED = "default", "tuned"
MOST_S: Final = 12.0
"""Of a load, after which what is not answered is broken off, in simulations too: some random YAMLs never catch up."""


@dataclass(frozen=True)
class Bench:
    """Where the files of one goal are."""

    name: str
    config: Path
    folder: Path
    profile: Profile
    seed: int

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.path("goal").exists():
            return
        task = TASKS[self.name]
        rate = f"{OVERLOAD * self._predicted_of(CLOSED)['requests_per_s']:.4g}" if "RATE" in task.load else ""
        figures = self._predicted_of(task.load.replace("RATE", rate))
        limit = f"{figures[task.halved] / 2:.3g}" if task.halved else ""
        self.path("goal").write_text(task.goal.replace("LIMIT", limit))

    def _predicted_of(self, load: str) -> Figures:
        """Figures of the configuration under a load, which stays the one of this goal."""
        self.path("load").write_text(f"seed: {self.seed}\n{VOCABULARY}{load}")
        return self.predicted(self.config, NO_SPECULATION)

    @property
    def goal(self) -> Goal:
        return read_goal(self.path("goal"))

    def path(self, name: str, suffix: str = "yaml") -> Path:
        return self.folder / f"{name}.{suffix}"

    def tune(self, profile: Path, num_trials: int) -> None:
        files = {"config": self.config, "goal": self.path("goal"), "load": self.path("load"), "profile": profile}
        arguments = [text for key, path in files.items() for text in (f"--{key}", str(path))]
        rest = ["--out", str(self.path(TUNED)), "--seed", str(self.seed), "--trials", str(num_trials)]
        if (code := llm_serving(["tune", *arguments, *rest])) not in (0, EXIT_FAILED):  # a goal out of reach is one
            sys.exit(code)

    def variants(self, num_random: int) -> Iterator[tuple[str, Path, list[str]]]:
        """(name, YAML, overrides) of each configuration."""
        yield DEFAULT, self.config, [*NO_SPECULATION]
        yield TUNED, self.path(TUNED), [*NO_SPECULATION]
        rng, found = random.Random(self.seed), 0
        knobs = knobs_for(load_config(self.config), read_workload(self.path("load")), self.goal)
        while found < num_random:
            overrides = [*NO_SPECULATION, *as_overrides({each.key: rng.choice(each.values) for each in knobs})]
            try:
                load_config(self.config, overrides)
            except ConfigError:  # a combination that is refused
                continue
            found += 1
            yield f"random {found}", self.config, overrides

    def measure(self, name: str, config: Path, overrides: Sequence[str]) -> None:
        """Keeps the figures of what clients saw of a server that is started for it."""
        load = read_workload(self.path("load"))
        with own_server(config, overrides, None) as served:
            url, classes = served.serving.url, served.request_classes
            uvloop.run(play(url, _warming(), classes, "warm"))
            played = uvloop.run(play(url, load, classes, until_s=MOST_S, salt="load"))
        figures = figures_of(Result(name, load.name, self.profile, played.outcomes))
        self.keep(name, figures)

    @property
    def measured(self) -> dict[str, Figures]:
        """By configuration; those that were not measured yet are missing."""
        path = self.path("measured", "json")
        return json.loads(path.read_text()) if path.exists() else {}

    def keep(self, name: str, figures: Figures) -> None:
        """Adds what was measured of a configuration."""
        measured = self.measured | {name: _of_clients(figures)}
        rows = ",\n".join(f"{json.dumps(each)}: {json.dumps(found)}" for each, found in measured.items())
        write_out(self.path("measured", "json"), f"{{\n{rows}\n}}\n")

    def predicted(self, config: Path, overrides: Sequence[str]) -> Figures:
        load = read_workload(self.path("load"))
        simulation = Simulation(load_config(config, overrides), load, self.profile, self.seed)
        return figures_of(simulation.run(lambda outcomes, now: now > MOST_S))

    def table(self, num_random: int) -> str:
        goal = self.goal
        keys = list(dict.fromkeys([*(each.figure.key for each in goal.constraints), goal.objective.key]))
        titles = [self.name, *(f"{key}: predicted / measured" for key in keys), "measured: keeps the constraints"]
        lines, scores = [titles, ["---"] * len(titles)], {}
        of_all = self.measured
        for name, config, overrides in self.variants(num_random):
            if name not in of_all:
                continue
            measured, predicted = of_all[name], self.predicted(config, overrides)
            scores[name] = score(goal, measured)
            cells = [f"{number(key, predicted[key])} / {number(key, measured.get(key, math.nan))}" for key in keys]
            lines.append([name, *cells, "yes" if scores[name] > -math.inf and not _broken(goal, measured) else "no"])
        best = max(scores, key=lambda name: scores[name]) if scores else "nothing"
        return f"{goal}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nbest: {best}\n"


def _warming() -> Load:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "warm.yaml"
        path.write_text(f"{VOCABULARY}{WARM}")
        return read_workload(path)


def _of_clients(figures: Figures) -> Figures:
    """Those that clients can tell, as far as anything was measured, in as many digits as that is good for."""
    return {
        key: float(f"{value:.4g}")
        for key, value in figures.items()
        if key.rpartition(".")[2] in OF_GROUP and not math.isnan(value)
    }


def score(goal: Goal, figures: Figures) -> float:
    """Of measured figures: constraints without their margin, then the objective; more is better."""
    if _broken(goal, figures):
        return -1e9 * sum(Constraint(each.figure, each.limit).excess(figures) for each in goal.constraints)
    value = figures.get(goal.objective.key, math.nan)
    return -math.inf if math.isnan(value) else value if goal.most else -value


def _broken(goal: Goal, figures: Figures) -> bool:
    return any(not Constraint(each.figure, each.limit).kept(figures) for each in goal.constraints)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True, help="of `llm-serving profile` on this machine")
    parser.add_argument("--config", type=Path, default=Path("configs/demo_cpu.yaml"), help="serving YAML to tune")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), help="of the goals")
    parser.add_argument("--random", type=int, default=10, help="YAMLs beside default and tuned (default: 10)")
    parser.add_argument("--trials", type=int, default=60, help="of the search (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="of loads, search and random YAMLs (default: 1)")
    parser.add_argument("--keep", type=Path, default=Path("tuning_proof"), help="folder for YAMLs and figures")
    parser.add_argument("--tune-only", action="store_true", help="tune where that is still to be done; measure nothing")
    parser.add_argument("--show-only", action="store_true", help="of what was measured before")
    arguments = parser.parse_args()
    profile = read_profile(arguments.profile)
    for name in arguments.only:
        folder: Path = arguments.keep / name.replace(" ", "_")
        bench = Bench(name, arguments.config, folder, profile, arguments.seed)
        if not bench.path(TUNED).exists():
            bench.tune(arguments.profile, arguments.trials)
        if arguments.tune_only:
            continue
        for each, config, overrides in bench.variants(arguments.random):
            if not arguments.show_only and each not in bench.measured:
                bench.measure(each, config, overrides)
        sys.stdout.write(bench.table(arguments.random) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
