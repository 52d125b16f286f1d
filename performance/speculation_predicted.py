"""Predicted and measured gain of speculative decoding: a server with it and one without, under the same loads.

    .venv/bin/python performance/speculation_predicted.py [--profile profile.json] [--keep FOLDER] [--rounds N]

Two loads: the shipped model's long answers, its questions drawn again and again, and random prompts answered at a
temperature at which no draft is accepted; each by so many clients, of which each asks again when it has been
answered. They are played over HTTP on a server with speculative decoding and on one without, in turns; both are
recorded. Then the requests that the first one has recorded, texts included, are simulated under both configurations.
What is compared is the ratio, with speculative decoding over without: of several rounds the median, the lowest and the
highest. Without `--profile`, what steps take is fitted to the same recordings.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import uvloop
from llm_serving.cli.own_server import own_server
from llm_serving.config import load_config
from llm_serving.core.timings import monotonic
from llm_serving.models.spec import ModelSpec
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.whatif.calibration import calibrate
from llm_serving.whatif.cost_model import CostModel
from llm_serving.whatif.figures import Figures, figures_of
from llm_serving.whatif.http_player import play
from llm_serving.whatif.load import Asked, Load, Stream
from llm_serving.whatif.measured_steps import read_timings
from llm_serving.whatif.profile import Profile, read_profile
from llm_serving.whatif.recorded_load import read_recorded_files, recording_files
from llm_serving.whatif.simulation import Result, Simulation
from workload import DEMO_QUESTIONS
from workload import load as read_questions

METHODS: Final = ("ngram", "none")
FIGURES: Final = ("output_tokens_per_s", "tpot_p50_ms")
ANSWER: Final = 200
"""Tokens."""
NOISE: Final = 2.0
"""A temperature."""
COUNTERS: Final = ("draft", "accepted")
NOTHING: Final = Profile("none", "clients", True, CostModel())
"""Figures of what clients saw take no profile."""


class Task(NamedTuple):
    load: Load
    temperature: float


class Run(NamedTuple):
    """Of one server."""

    figures: Figures
    num_draft_tokens: int
    num_accepted: int


def tasks(tokenizer: Tokenizer, vocab_size: int, clients: int, num: int, seed: int) -> dict[str, Task]:
    rng = random.Random(seed)
    texts = [each.text for each in read_questions(DEMO_QUESTIONS) if len(each.reference) > 100]
    prompts = [tokenizer.encode(rng.choice(texts[:12])) for _ in range(num)]
    noise = [rng.choices(range(3, vocab_size), k=32) for _ in range(num)]
    return {
        "recitations": Task(_load("recitations", prompts, clients, vocab_size), 0.0),
        "noise": Task(_load("noise", noise, clients, vocab_size), NOISE),
    }


def _load(name: str, prompts: Sequence[list[int]], clients: int, vocab_size: int) -> Load:
    requests = [Asked(name, 0.0, prompt, ANSWER, ANSWER, ignore_eos=True) for prompt in prompts]
    return Load(name, (Stream(name, requests, clients),), 0, vocab_size)


def warming(load: Load) -> Load:
    """Its first requests, which find nothing later and are found by nobody."""
    return Load("warm", (Stream("warm", load.streams[0].requests[:3], 1),), 0, load.vocab_size)


def measure(task: Task, method: str, arguments: argparse.Namespace, folder: Path) -> Run:
    """Plays a load on a server of its own; its recording is in the folder then."""
    settings = [f"scheduler_config.speculative_method={method}"]
    with own_server(arguments.config, settings, None, folder) as config:
        url, classes = config.serving.url, config.request_classes
        uvloop.run(play(url, warming(task.load), classes, "warm", salt="warm", temperature=NOISE))
        time.sleep(arguments.pause)
        before, began = _counts(url), monotonic()
        played = uvloop.run(play(url, task.load, classes, salt="load", temperature=task.temperature))
        after = _counts(url)
    (folder / "began").write_text(repr(began))
    figures = figures_of(Result(method, task.load.name, NOTHING, played.outcomes))
    return Run(figures, *(late - early for early, late in zip(before, after, strict=True)))


def _counts(url: str) -> list[int]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:  # noqa: S310  of this machine
        lines = response.read().decode().splitlines()
    names = [f"vllm:spec_decode_num_{each}_tokens_total" for each in COUNTERS]
    return [round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))) for name in names]


def predict(folder: Path, clients: int, profile: Profile, arguments: argparse.Namespace) -> dict[str, Run]:
    """What both servers do, by the recording of the one with speculative decoding."""
    since = float((folder / "began").read_text())
    recorded = read_recorded_files(recording_files(folder), folder.name, since)
    (stream,) = recorded.streams
    asked = [replace(each, due_s=0.0) for each in stream.requests]
    load = replace(recorded, streams=(Stream(stream.name, asked, clients),))
    found = {}
    for method in METHODS:
        config = load_config(arguments.config, [f"scheduler_config.speculative_method={method}"])
        result = Simulation(config, load, profile, arguments.seed).run()
        found[method] = Run(figures_of(result), result.num_draft_tokens, result.num_accepted)
    return found


def show(name: str, measured: Sequence[dict[str, Run]], predicted: Sequence[dict[str, Run]]) -> None:
    def ratios(runs: Sequence[dict[str, Run]], key: str) -> str:
        found = [each["ngram"].figures[key] / each["none"].figures[key] for each in runs]
        return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"

    for key in FIGURES:
        print(f"| {name} | {key} | {ratios(predicted, key)} | {ratios(measured, key)} |")

    def counts(runs: Sequence[dict[str, Run]]) -> tuple[float, float]:
        found = [each["ngram"] for each in runs]
        return statistics.median(each.num_draft_tokens for each in found), statistics.median(
            each.num_accepted for each in found
        )

    keys = ("draft_tokens", "accepted_draft_tokens")
    for key, count, of_servers in zip(keys, counts(predicted), counts(measured), strict=True):
        print(f"| {name} | {key} | {count:.0f} | {of_servers:.0f} |", flush=True)


def compare(name: str, task: Task, clients: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Plays a load so many times on both servers, and shows what came of it beside what is predicted."""
    turns = range(arguments.rounds)
    measured = [
        {
            method: measure(task, method, arguments, folder / f"{name} {method} {turn}")
            for method in (METHODS if turn % 2 == 0 else METHODS[::-1])
        }
        for turn in turns
    ]
    profile = read_profile(arguments.profile) if arguments.profile else own_steps(folder, name)
    show(name, measured, [predict(folder / f"{name} ngram {turn}", clients, profile, arguments) for turn in turns])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo_cpu.yaml"), help="serving YAML")
    parser.add_argument("--profile", type=Path, help="of `llm-serving profile` on this machine")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="at once, by turns (default: 1 8)")
    parser.add_argument("--requests", type=int, default=48, help="of each load (default: 48)")
    parser.add_argument("--rounds", type=int, default=3, help="of both servers in turns (default: 3)")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before a load (default: 0.5)")
    parser.add_argument("--seed", type=int, default=1, help="of loads and simulation (default: 1)")
    parser.add_argument("--keep", type=Path, help="folder for the recordings, new or empty")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="speculation-") as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        path = load_config(arguments.config, []).model.model_path
        assert path is not None
        tokenizer, vocab_size = Tokenizer.load(path), ModelSpec.from_folder(path).vocab_size
        print("| load | figure | predicted | measured |\n| --- | --- | --- | --- |")
        for clients in arguments.clients:
            for name, task in tasks(tokenizer, vocab_size, clients, arguments.requests, arguments.seed).items():
                compare(f"{name} {clients}", task, clients, arguments, folder)
    return 0


def own_steps(folder: Path, name: str) -> Profile:
    """What steps took in all recordings of a load."""
    files = [file for each in sorted(folder.glob(f"{name} *")) for file in recording_files(each)]
    return calibrate(read_timings(files), name="recorded", source="the recordings of these servers").profile


if __name__ == "__main__":
    sys.exit(main())
