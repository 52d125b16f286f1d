"""Speculative decoding on and off, under a mix of predictable and unpredictable answers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Trial, draw_groups, make_job
from experiments.results import Result, Table, grouped_bars, legend_below, panels
from load_test import workload
from load_test.metrics import Distribution, ServiceLevel, Summary, summarize
from load_test.runner import Job, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"none": "off", "ngram": "n-gram lookup"}
ROUNDS = 2
"""Servers of each kind, in turns, so that other load on the machine affects both."""
NUM_SLOTS = 64
NUM_AT_ONCE = 500
NUM_OPEN_LOOP = 400
NUM_RECITATIONS = 48
WEIGHTS = {"recitation": 0.3, "question": 0.7}
MAX_TOKENS = 400
SHARES = (0.5, 0.8, 0.95)
"""Shares of the capacity of the first server without draft tokens."""


def run(bench: Bench) -> Result:
    jobs = _jobs(bench)
    capacity = 0.0
    for number in range(ROUNDS):
        for method, name in METHODS.items():
            settings = (f"scheduler_config.speculative_method={method}", f"model_config.decode_batch_size={NUM_SLOTS}")
            with bench.serve(f"{name} {number + 1}", *settings) as server:
                jobs = server.referenced(jobs)
                at_once = server.run("at once", jobs, [0.0] * len(jobs))
                capacity = capacity or measures.saturated_rate(at_once.records)
                num = min(len(jobs), bench.count(NUM_OPEN_LOOP))
                for share in SHARES:
                    server.run(f"{share:.0%}", jobs[:num], poisson(share * capacity, num, bench.seed))
    return _result(bench, len(jobs), capacity)


def _jobs(bench: Bench) -> list[Job]:
    rng = random.Random(bench.seed)
    questions = workload.load(workload.DEMO_QUESTIONS)
    longest = sorted(questions, key=lambda prompt: len(prompt.reference), reverse=True)[:NUM_RECITATIONS]
    pool = {"recitation": longest, "question": questions}
    names = draw_groups(bench.count(NUM_AT_ONCE), WEIGHTS, rng)
    return [make_job(rng.choice(pool[name]), name, MAX_TOKENS) for name in names]


def _result(bench: Bench, num_jobs: int, capacity: float) -> Result:
    header = [
        "",
        "requests/s",
        "output tok/s",
        "TTFT p50 / p99, ms",
        "between tokens p50 / p99, ms",
        "latency p50 / p99, ms",
        "accepted draft tokens, of all",
    ]
    tables = {}
    for load in ("at once", *(f"{share:.0%}" for share in SHARES)):
        rows = [_row(trial) for trial in bench.trials if trial.load == load]
        title = "All at once:" if load == "at once" else f"Poisson at {load} of {capacity:.0f} requests/s:"
        tables[title] = Table(header, rows)
    names = [f"{share:.0%}" for share in SHARES]
    tables["99th percentile of the latency, the median of the servers of each kind:"] = Table(
        ["load", *METHODS.values(), "ratio"], [_tail(bench.trials, name) for name in names]
    )
    load = (
        f"{num_jobs} requests of the demo model's questions, 30 % of them of the {NUM_RECITATIONS} with the longest "
        f"answers (recitations, tables, counting), greedy, streamed; {NUM_SLOTS} slots. At once, then the first "
        f"{bench.count(NUM_OPEN_LOOP)} by their arrival times. Servers run in turns; drafts come from the prompt and "
        "from earlier answers."
    )
    return Result("Speculative decoding", load, tables, _figure(bench.trials))


def _row(trial: Trial) -> Sequence[str | float]:
    summary = _summary(trial)
    gaps = Distribution.of(measures.gaps_ms(trial.records, max(record.end_s for record in trial.records)))
    num_accepted = trial.counters.get("vllm:spec_decode_num_accepted_tokens_total", 0.0)
    return [
        trial.variant,
        summary.requests_per_s,
        summary.output_tokens_per_s,
        f"{summary.ttft_ms.p50:,.1f} / {summary.ttft_ms.p99:,.1f}",
        f"{gaps.p50:,.2f} / {gaps.p99:,.1f}",
        f"{summary.latency_ms.p50:,.0f} / {summary.latency_ms.p99:,.0f}",
        f"{num_accepted / max(1, summary.num_output_tokens):.0%}",
    ]


def _tail(trials: Sequence[Trial], load: str) -> Sequence[str | float]:
    """Return the p99 of the latency in ms at a load, without and with drafts, and its ratio."""
    plain, drafted = (
        statistics.median(
            _summary(trial).latency_ms.p99 for trial in trials if trial.load == load and trial.variant.startswith(name)
        )
        for name in METHODS.values()
    )
    return [load, f"{plain:,.0f}", f"{drafted:,.0f}", f"{drafted / plain:.2f}"]


def _summary(trial: Trial) -> Summary:
    return summarize(trial.records, ServiceLevel())


def _figure(trials: Sequence[Trial]) -> Figure:
    figure, (left, right) = panels(1, 2, 3.4)
    variants = list(dict.fromkeys(trial.variant for trial in trials))
    loads_of = {name: {trial.load: _summary(trial) for trial in trials if trial.variant == name} for name in variants}
    grouped_bars(left, ["at once"], {name: [each["at once"].output_tokens_per_s] for name, each in loads_of.items()})
    left.set_title("Throughput")
    left.set_ylabel("output tok/s")
    names = [f"{share:.0%}" for share in SHARES]
    grouped_bars(right, names, {name: [each[n].latency_ms.p50 for n in names] for name, each in loads_of.items()})
    right.set_title("Latency p50")
    right.set_xlabel("of capacity")
    right.set_ylabel("ms")
    legend_below(figure, left)
    return figure
