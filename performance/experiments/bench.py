"""What all experiments share: servers one after the other, reference answers, loads, and whether all went right."""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from client import GenerationOptions, resolve_model
from http_client import HttpClient
from metrics import ExactMatch, exact_match
from records import RequestRecord
from report import failures
from runner import Job, Load, Run, run_load

from experiments.server import ServerError, read_counters, serving

NUM_WARMUP_JOBS = 16
MIN_REQUESTS = 10
"""So that every group of a small try has some."""


@dataclass(frozen=True)
class Trial:
    """One load against one server.

    Attributes:
        records: In the order of the jobs; `task` names the group of a request.
        counters: By how much each counter of `/metrics` rose.
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
    """Runs trials and keeps them.

    Attributes:
        model: Folder, or `demo`.
        scale: Of the number of requests; 1.0 is what the experiment states, less is for trying it out.
        references: Answers that (prompt, max_tokens, ignore_eos) got alone.
        known_right: For each of them that has a known right answer, whether it is that.
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
    def serve(self, variant: str, *overrides: str) -> Iterator["Served"]:
        """A server with the demo model's configuration and `overrides`, for as long as the block lasts."""
        print(f"{variant}: starting a server {' '.join(overrides)}", file=sys.stderr, flush=True)
        with serving(self.model, overrides) as http:
            model_name = asyncio.run(resolve_model(http, "openai", None))
            yield Served(self, variant, http, GenerationOptions("openai", model_name))
            self.server_totals[variant] = asyncio.run(read_counters(http))

    @property
    def exact(self) -> ExactMatch:
        """Answers under load that equal the answer given alone."""
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
        """The same jobs, each expecting what its prompt was answered alone; asks for what is not known yet.

        Raises:
            ServerError: A request failed although it was alone.
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
        """Sends referenced jobs when they are due, ascending, after a few to warm up."""
        return self.run_beside(load, (jobs, Load(due_times_s)))

    def run_beside(self, load: str, *streams: tuple[Sequence[Job], Load]) -> Trial:
        """Sends several streams of referenced jobs at once, each in its own way, after a few to warm up."""
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
    """What an answer depends on."""
    return job.prompt.text, job.max_tokens, bool(job.fields.get("ignore_eos"))
