"""The scheduling policies against each other at 50, 90 and 120 % of the server's capacity."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import MIN_REQUESTS, Bench, Served, Trial, draw_groups, make_job
from experiments.results import Result, Table, grouped_bars, legend_below, logarithmic, panels
from load_test import workload
from load_test.metrics import ServiceLevel, Summary, summarize
from load_test.runner import Job, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICIES = ("prefill_first", "decode_first", "mixed", "throughput", "fcfs")
NUM_SLOTS = 32
NUM_QUESTIONS = 100
NUM_FOR_CAPACITY = 200
MAX_TOKENS = 500
"""More than the tokens of any right answer."""
LOADS = {0.5: 2.5, 0.9: 3.0, 1.2: 5.0}
"""Share of the capacity -> seconds of arrivals."""
CLASSES = {"interactive": 0.2, "standard": 0.6, "batch": 0.2}
LEVELS = {"interactive": ServiceLevel(1000, 100), "standard": ServiceLevel(5000, 200), "batch": ServiceLevel()}
"""Service levels of configs/serving.yaml."""
PREFILL_MS, DECODE_MS = 2, 5
"""Step times that `throughput` assumes, about those of the demo model."""


def run(bench: Bench) -> Result:
    with ExitStack() as stack:  # all servers at once, so that a load reaches all policies within a minute
        servers = [stack.enter_context(bench.serve(policy, *_settings(policy))) for policy in POLICIES]
        capacity = _measure_capacity(servers[0])
        for share, seconds in LOADS.items():
            num = max(MIN_REQUESTS, bench.count(round(share * capacity * seconds)))
            for server in servers:
                jobs = server.referenced(_jobs(bench, num))
                server.run(f"{share:.0%}", jobs, poisson(share * capacity, num, bench.seed))
    return _result(bench, capacity)


def _settings(policy: str) -> list[str]:
    settings = [f"scheduler_config.policy={policy}", f"model_config.decode_batch_size={NUM_SLOTS}"]
    if policy == "throughput":
        settings += [
            f"scheduler_config.prefill_time_ms_per_req={PREFILL_MS}",
            f"scheduler_config.decode_time_ms_per_req={DECODE_MS}",
        ]
    return settings


def _jobs(bench: Bench, num: int) -> list[Job]:
    """Return questions of all kinds with classes in random order; no answer is cut off."""
    rng = random.Random(bench.seed)
    questions = workload.choose(workload.load(workload.DEMO_QUESTIONS), NUM_QUESTIONS, bench.seed)
    chosen = workload.choose(questions, num, bench.seed)
    names = draw_groups(num, CLASSES, rng)
    return [
        make_job(question, name, min(MAX_TOKENS, workload.max_tokens(question, None)), priority_class=name)
        for question, name in zip(chosen, names, strict=True)
    ]


def _measure_capacity(server: Served) -> float:
    """Return the requests per second with all slots occupied."""
    jobs = server.referenced(_jobs(server.bench, server.bench.count(NUM_FOR_CAPACITY)))
    return measures.saturated_rate(server.run("capacity", jobs, [0.0] * len(jobs)).records)


def _result(bench: Bench, capacity: float) -> Result:
    trials = {(trial.variant, trial.load): trial for trial in bench.trials}
    names = [f"{share:.0%}" for share in LOADS]
    latencies = Table(
        ["load", "policy", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p50 / p99", "requests/s"],
        [_latency_row(trials[policy, name]) for name in names for policy in POLICIES],
    )
    classes = Table(
        ["load", "policy", *(f"{name}: TTFT p50 / p99, within SLO" for name in CLASSES), "goodput, requests/s"],
        [_class_row(trials[policy, name]) for name in names for policy in POLICIES],
    )
    load = (
        f"Capacity with all {NUM_SLOTS} slots taken: {capacity:.1f} requests/s. Poisson arrivals at 50, 90 and "
        f"120 % of it for {', '.join(f'{seconds:g}' for seconds in LOADS.values())} s, questions of all kinds, 20 % "
        "interactive, 60 % standard, 20 % batch, with the SLOs of configs/serving.yaml. `throughput` reckons with "
        f"{PREFILL_MS} ms a prompt and {DECODE_MS} ms a decode step."
    )
    tables = {"All classes, ms:": latencies, "By class (TTFT in ms; share within the SLO):": classes}
    return Result("Policies below and above capacity", load, tables, _figure(trials, names))


def _figure(trials: dict[tuple[str, str], Trial], names: Sequence[str]) -> Figure:
    figure, axes = panels(2, 2, 6.0)
    overall = {key: summarize(trial.records, ServiceLevel()) for key, trial in trials.items()}
    interactive = {key: _of_class(trial, "interactive") for key, trial in trials.items()}
    drawn = (
        ("TTFT p99, all classes", "ms, logarithmic", [overall[p, n].ttft_ms.p99 for p in POLICIES for n in names]),
        ("TTFT p99, interactive", "ms, logarithmic", [interactive[p, n].ttft_ms.p99 for p in POLICIES for n in names]),
        ("ITL p99, all classes", "ms", [overall[p, n].itl_ms.p99 for p in POLICIES for n in names]),
        ("Goodput", "requests/s within their SLO", [_goodput(trials[p, n]) for p in POLICIES for n in names]),
    )
    for panel, (title, unit, values) in zip(axes, drawn, strict=True):
        series = {p: values[i * len(names) : (i + 1) * len(names)] for i, p in enumerate(POLICIES)}
        grouped_bars(panel, [f"{name} load" for name in names], series, "{:.3g}" if max(values) < 1000 else "{:.0f}")
        if "logarithmic" in unit:
            logarithmic(panel, 1)
        panel.set_title(title)
        panel.set_ylabel(unit)
    legend_below(figure, axes[0])
    return figure


def _latency_row(trial: Trial) -> Sequence[str | float]:
    summary = summarize(trial.records, ServiceLevel())
    spreads = (summary.ttft_ms, summary.tpot_ms, summary.itl_ms)
    pairs = (f"{each.p50:,.1f} / {each.p99:,.1f}" for each in spreads)
    return [trial.load, trial.variant, *pairs, summary.requests_per_s]


def _class_row(trial: Trial) -> Sequence[str | float]:
    groups = measures.by_group(trial.records)
    cells = []
    for name in CLASSES:
        ttft = _of_class(trial, name).ttft_ms
        cells.append(f"{ttft.p50:,.0f} / {ttft.p99:,.0f}, {measures.met_share(groups[name], LEVELS[name]):.0%}")
    return [trial.load, trial.variant, *cells, _goodput(trial)]


def _of_class(trial: Trial, name: str) -> Summary:
    return summarize(measures.by_group(trial.records)[name], LEVELS[name])


def _goodput(trial: Trial) -> float:
    return measures.goodput_per_s(trial.records, LEVELS, summarize(trial.records, ServiceLevel()).span_s)
