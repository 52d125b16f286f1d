"""Speculative decoding on and off, under a mix of predictable and unpredictable answers."""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Trial, draw_groups, make_job
from experiments.results import Result, Table, grouped_bars, legend_below, panels
from load_test import workload
from load_test.metrics import Distribution, RequestRecord, ServiceLevel, Summary, summarize
from load_test.runner import Job, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = {"none": "off", "ngram": "n-gram lookup"}
NUM_TURNS = 6
"""How often each load is sent to both servers in turn, so that other load on the machine affects both alike."""
NUM_SLOTS = 64
NUM_AT_ONCE = 250
NUM_OPEN_LOOP = 150
NUM_RECITATIONS = 48
WEIGHTS = {"recitation": 0.3, "question": 0.7}
MAX_TOKENS = 400
AT_ONCE = "at once"
SHARES = (0.5, 0.8, 0.95)
"""Shares of the capacity of the server without draft tokens."""

Pooled = Mapping[tuple[str, str], Trial]
"""(variant, load) -> the trials of all turns as one, one after the other."""


def run(bench: Bench) -> Result:
    jobs = _jobs(bench)
    slots = f"model_config.decode_batch_size={NUM_SLOTS}"
    off, ngram = (
        bench.serve(name, f"scheduler_config.speculative_method={method}", slots) for method, name in METHODS.items()
    )
    with off as first, ngram as second:
        jobs = first.referenced(jobs)
        at_once = jobs[: bench.count(NUM_AT_ONCE)]
        first.run("warm-up", at_once, [0.0] * len(at_once))
        capacity = measures.saturated_rate(bench.trials.pop().records)
        num = bench.count(NUM_OPEN_LOOP)
        for turn in range(NUM_TURNS):
            chosen = random.Random(bench.seed + turn).sample(jobs, num)
            servers = (first, second) if turn % 2 else (second, first)
            for server in servers:
                server.run(AT_ONCE, at_once, [0.0] * len(at_once))
            for share in SHARES:
                due_times_s = poisson(share * capacity, num, bench.seed + turn)
                for server in servers:
                    server.run(f"{share:.0%}", chosen, due_times_s)
    return _result(bench, len(jobs), capacity)


def _jobs(bench: Bench) -> list[Job]:
    rng = random.Random(bench.seed)
    questions = workload.load(workload.DEMO_QUESTIONS)
    longest = sorted(questions, key=lambda prompt: len(prompt.reference), reverse=True)[:NUM_RECITATIONS]
    pool = {"recitation": longest, "question": questions}
    names = draw_groups(bench.count(2 * NUM_AT_ONCE), WEIGHTS, rng)
    return [make_job(rng.choice(pool[name]), name, MAX_TOKENS) for name in names]


def pooled(trials: Sequence[Trial]) -> Trial:
    """Return trials of one server and load as one trial, as if each began when the one before had ended."""
    records: list[RequestRecord] = []
    counters: Counter[str] = Counter()
    start_s = 0.0
    for trial in trials:
        records += [_later(record, start_s) for record in trial.records]
        counters.update(trial.counters)
        start_s += max(record.end_s for record in trial.records)
    return replace(trials[0], records=records, counters=dict(counters))


def _later(record: RequestRecord, by_s: float) -> RequestRecord:
    return replace(
        record,
        due_s=record.due_s + by_s,
        sent_s=record.sent_s + by_s,
        end_s=record.end_s + by_s,
        token_times_s=tuple(time_s + by_s for time_s in record.token_times_s),
    )


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
    by_load: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in bench.trials:
        by_load[trial.variant, trial.load].append(trial)
    trials = {key: pooled(turns) for key, turns in by_load.items()}
    tables = {}
    for load in (AT_ONCE, *(f"{share:.0%}" for share in SHARES)):
        title = "All at once:" if load == AT_ONCE else f"Poisson at {load} of {capacity:.0f} requests/s:"
        tables[title] = Table(header, [_row(trials[name, load]) for name in METHODS.values()])
    ratios = [_ratios(by_load, trials, load) for load in (AT_ONCE, *(f"{share:.0%}" for share in SHARES))]
    tables["With n-gram lookup, as a multiple of the figure without:"] = Table(
        ["load", "TTFT p99", "latency p99", "mean latency, median of the turns", "least and greatest turn"], ratios
    )
    load = (
        f"{num_jobs} requests of the demo model's questions, 30 % of them of the {NUM_RECITATIONS} with the longest "
        f"answers (recitations, tables, counting), greedy, streamed; {NUM_SLOTS} slots. Two servers run at the same "
        f"time and get each load in turn, {NUM_TURNS} times: {bench.count(NUM_AT_ONCE)} requests at once, and "
        f"{bench.count(NUM_OPEN_LOOP)} at their arrival times. Percentiles are over the requests of all turns. Drafts "
        "come from the prompt and from earlier answers."
    )
    return Result("Speculative decoding", load, tables, _figure(trials))


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


def _ratios(by_load: Mapping[tuple[str, str], Sequence[Trial]], trials: Pooled, load: str) -> Sequence[str | float]:
    off, ngram = ((name, load) for name in METHODS.values())
    plain, drafted = _summary(trials[off]), _summary(trials[ngram])
    turns = sorted(
        _summary(after).latency_ms.mean / _summary(before).latency_ms.mean
        for before, after in zip(by_load[off], by_load[ngram], strict=True)
    )
    return [
        load,
        f"{drafted.ttft_ms.p99 / plain.ttft_ms.p99:.2f}",
        f"{drafted.latency_ms.p99 / plain.latency_ms.p99:.2f}",
        f"{statistics.median(turns):.2f}",
        f"{turns[0]:.2f} to {turns[-1]:.2f}",
    ]


def _summary(trial: Trial) -> Summary:
    return summarize(trial.records, ServiceLevel())


def _figure(trials: Pooled) -> Figure:
    figure, (left, right) = panels(1, 2, 3.4)
    names = [f"{share:.0%}" for share in SHARES]
    summaries = {key: _summary(trial) for key, trial in trials.items()}
    tokens = {name: [summaries[name, AT_ONCE].output_tokens_per_s] for name in METHODS.values()}
    grouped_bars(left, [AT_ONCE], tokens)
    left.set_title("Throughput")
    left.set_ylabel("output tok/s")
    tails = {name: [summaries[name, load].latency_ms.p99 for load in names] for name in METHODS.values()}
    grouped_bars(right, names, tails)
    right.set_title("Latency p99")
    right.set_xlabel("of capacity")
    right.set_ylabel("ms")
    legend_below(figure, left)
    return figure
