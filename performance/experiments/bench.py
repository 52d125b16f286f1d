"""Servers that an experiment starts and loads, their reference answers, and seeded mixes of requests."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from load_test.api_client import GenerationOptions, resolve_model
from load_test.http_client import HttpClient
from load_test.metrics import ExactMatch, RequestRecord, exact_match
from load_test.report import failures
from load_test.runner import Job, Load, Run, run_load
from load_test.workload import Prompt

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LESS_URGENT = ("nice", "-n", "5")
"""Command that lowers the priority of the server: its clients share its cores, which remote clients would not do."""


class ServerError(Exception):
    """The server did not start or respond; the message has its output."""


@contextmanager
def serving(model: str, overrides: Sequence[str]) -> Iterator[HttpClient]:
    """Serve `model` (a folder, or `demo`) with `configs/demo_cpu.yaml` and SECTION.KEY=VALUE overrides.

    Raises:
        ServerError: The server did not become ready.
    """
    port = _free_port()
    settings = [f"model_config.model_path={model}", *overrides]
    options = [part for setting in settings for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="llm-serving-experiment-") as run_dir:
        try:
            _script(run_dir, "start.sh", "--port", str(port), *options, runs=LESS_URGENT)
            yield HttpClient("127.0.0.1", port)
        finally:
            _script(run_dir, "stop.sh", "--port", str(port))


def _script(run_dir: str, name: str, *arguments: str, runs: Sequence[str] = ()) -> None:
    environment = {**os.environ, "LLM_SERVING_RUN_DIR": run_dir}
    if sys.prefix != sys.base_prefix:
        environment["LLM_SERVING_VENV"] = sys.prefix
    command = [*runs, "bash", str(SCRIPTS / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603
    if result.returncode != 0:
        raise ServerError(f"{name} failed:\n{result.stdout}{result.stderr}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def read_counters(http: HttpClient) -> dict[str, float]:
    """Return the counters of `/metrics` by name, each summed over its labels."""
    response = await http.request("GET", "/metrics")
    if response.status != 200:
        raise ServerError(f"GET /metrics answered HTTP {response.status}")
    return parse_counters(response.body.decode())


def parse_counters(text: str) -> dict[str, float]:
    """Return the samples whose name ends with `_total` from Prometheus's text format."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if not line.startswith("#") and name.endswith("_total"):
            counters[name] = counters.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return counters


SHORT_ANSWER_CHARACTERS = 12


def draw_groups(num: int, weights: Mapping[str, float], rng: random.Random) -> list[str]:
    """Return `num` names in random order in proportion to their weights, rounded by largest remainder."""
    total = sum(weights.values())
    exact = {name: num * weight / total for name, weight in weights.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: num - sum(counts.values())]:
        counts[name] += 1
    names = [name for name, count in counts.items() for _ in range(count)]
    rng.shuffle(names)
    return names


def make_job(prompt: Prompt, group: str, max_tokens: int, **fields: Any) -> Job:
    """Return a job of a group; `RequestRecord.task` is the name of the group."""
    return Job(replace(prompt, task=group), max_tokens, fields)


def short_questions(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the questions whose right answer is a word or a number."""
    return [prompt for prompt in prompts if len(prompt.reference) <= SHORT_ANSWER_CHARACTERS]


def long_prompts(questions: Sequence[Prompt], num_prompts: int, num_words: int, rng: random.Random) -> list[Prompt]:
    """Return prompts of `num_words` words of the questions that differ from the first word on."""
    words = sorted({word for prompt in questions for word in re.findall(r"\b[a-z]{3,}\b", prompt.text)})
    firsts = rng.sample(words, num_prompts)
    return [Prompt(" ".join([first, *rng.choices(words, k=num_words - 1)])) for first in firsts]


def merge_schedules(*streams: tuple[Sequence[Job], Sequence[float]]) -> tuple[list[Job], list[float]]:
    """Merge several (jobs, due times in seconds) into one schedule in order of time."""
    pairs = [pair for jobs, due_times_s in streams for pair in zip(jobs, due_times_s, strict=True)]
    pairs.sort(key=lambda pair: pair[1])
    return [job for job, _ in pairs], [due for _, due in pairs]


NUM_WARMUP_JOBS = 16
MIN_REQUESTS = 10
"""Minimum number of requests, so that every group of a small experiment has some."""


@dataclass(frozen=True)
class Trial:
    """One load against one server.

    Attributes:
        records: In the order of the jobs; `task` names the group of a request.
        counters: Increase of each counter of `/metrics`.
        client_cpu_share: Share of one core that the load generator took.
    """

    variant: str
    load: str
    records: list[RequestRecord]
    counters: dict[str, float]
    client_cpu_share: float

    @property
    def steps(self) -> int:
        return int(self.counters["llm_serving:steps_total"])


@dataclass
class Bench:
    """Runs the trials of an experiment and keeps their results.

    Attributes:
        model: A folder, or `demo`.
        scale: Factor on the number of requests; 1.0 is the experiment as published.
        references: (prompt, max_tokens, ignore_eos) -> reference answer (batch size 1).
        known_right: Whether the reference answer is right, for each one with a known right answer.
        server_totals: Variant -> counters of `/metrics` when its server was stopped.
    """

    model: str
    seed: int
    scale: float = 1.0
    trials: list[Trial] = field(default_factory=list)
    references: dict[tuple[str, int, bool], str] = field(default_factory=dict)
    known_right: list[bool] = field(default_factory=list)
    server_totals: dict[str, dict[str, float]] = field(default_factory=dict)

    def count(self, num_requests: int) -> int:
        return max(min(num_requests, MIN_REQUESTS), round(num_requests * self.scale))

    @contextmanager
    def serve(self, variant: str, *overrides: str) -> Iterator[Served]:
        """Start a server with the demo model's configuration and `overrides`; stop it at the end of the block."""
        print(f"{variant}: starting a server {' '.join(overrides)}", file=sys.stderr, flush=True)
        with serving(self.model, overrides) as http:
            model_name = asyncio.run(resolve_model(http, "openai", None))
            yield Served(self, variant, http, GenerationOptions("openai", model_name))
            self.server_totals[variant] = asyncio.run(read_counters(http))

    @property
    def exact(self) -> ExactMatch:
        """Answers under load that equal the reference answer (batch size 1)."""
        return exact_match(record for trial in self.trials for record in trial.records)

    @property
    def num_failed(self) -> int:
        return sum(not record.ok for trial in self.trials for record in trial.records)

    @property
    def num_bound_violations(self) -> int:
        return self._total("llm_serving:bound_violations_total")

    @property
    def num_restarts(self) -> int:
        return self._total("llm_serving:worker_restarts_total")

    @property
    def went_right(self) -> bool:
        exact = self.exact
        return not (self.num_failed or self.num_bound_violations or self.num_restarts) and exact.rate == 1.0

    def _total(self, counter: str) -> int:
        return int(sum(totals[counter] for totals in self.server_totals.values()))


@dataclass(frozen=True)
class Served:
    """A running server of a bench."""

    bench: Bench
    variant: str
    http: HttpClient
    options: GenerationOptions

    def referenced(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs with reference answers; unknown ones are generated, each as the only request.

        Raises:
            ServerError: A request failed although no other request was running.
        """
        references = self.bench.references
        unknown = list({_key(job): job for job in jobs if _key(job) not in references}.values())
        run = self._run(unknown, Load(concurrency=1))
        if errors := failures(run.records):
            raise ServerError(f"the reference run failed: {errors[0]}")
        for record in run.records:
            job = unknown[record.index]
            references[_key(job)] = record.text
            if record.expected and not job.fields.get("ignore_eos"):
                self.bench.known_right.append(bool(record.exact))
        return [replace(job, prompt=replace(job.prompt, reference=references[_key(job)])) for job in jobs]

    def run(self, load: str, jobs: Sequence[Job], due_times_s: Sequence[float]) -> Trial:
        """Send jobs with reference answers at ascending due times, after a warm-up."""
        return self.run_concurrently(load, (jobs, Load(due_times_s)))

    def run_concurrently(self, load: str, *streams: tuple[Sequence[Job], Load]) -> Trial:
        """Send several streams of jobs at once, each with its own arrivals, after a warm-up."""
        jobs = [job for stream, _ in streams for job in stream]
        assert all(_key(job) in self.bench.references for job in jobs)
        self._run(jobs[:NUM_WARMUP_JOBS], Load(concurrency=NUM_WARMUP_JOBS))
        before = asyncio.run(read_counters(self.http))
        runs = asyncio.run(self._run_all(streams))
        after = asyncio.run(read_counters(self.http))
        counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
        records = [record for run in runs for record in sorted(run.records, key=lambda record: record.index)]
        trial = Trial(self.variant, load, records, counters, sum(run.client_cpu_share for run in runs))
        self.bench.trials.append(trial)
        exact = exact_match(records)
        wall_s = max(run.wall_s for run in runs)
        print(
            f"  {self.variant}, {load}: {wall_s:.1f} s, {exact.num_exact} of {exact.num_expected} exact",
            file=sys.stderr,
        )
        for reason in failures(records):
            print(f"  failed: {reason}", file=sys.stderr)
        return trial

    async def _run_all(self, streams: Sequence[tuple[Sequence[Job], Load]]) -> list[Run]:
        loads = (run_load(self.http, self.options, jobs, load, lambda _: None) for jobs, load in streams)
        return await asyncio.gather(*loads)

    def _run(self, jobs: Sequence[Job], load: Load) -> Run:
        return asyncio.run(run_load(self.http, self.options, jobs, load, lambda _: None))


def _key(job: Job) -> tuple[str, int, bool]:
    """Return what an answer depends on."""
    return job.prompt.text, job.max_tokens, bool(job.fields.get("ignore_eos"))
