"""A burst of batch requests beside interactive users, with and without request classes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Trial, make_job, merge_schedules, short_questions
from experiments.results import COLOURS, Result, Table, grouped_bars, legend_below, logarithmic, panels
from load_test import workload
from load_test.metrics import ServiceLevel, Summary, summarize
from load_test.runner import Job, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = {
    "classes, recompute": (True, ("scheduler_config.preemption_mode=recompute",)),
    "classes, swap": (True, ("scheduler_config.preemption_mode=swap", "pa_config.num_swap_blocks=2048")),
    "one class": (False, ()),
    "fcfs": (True, ("scheduler_config.policy=fcfs",)),
}
"""Variant -> (whether requests name their class, settings)."""
NUM_BATCH, BATCH_OUTPUT_TOKENS, NUM_BATCH_PROMPTS = 200, 300, 16
BURST_AT_S = 1.0
INTERACTIVE_RATE, INTERACTIVE_SECONDS, NUM_QUESTIONS = 10.0, 15.0, 60


def run(bench: Bench) -> Result:
    for variant, (classes, settings) in VARIANTS.items():
        with bench.serve(variant, *settings) as server:
            interactive, batch = (server.referenced(jobs) for jobs in _jobs(bench, classes))
            arrivals_s = poisson(INTERACTIVE_RATE, len(interactive), bench.seed)
            jobs, due_times_s = merge_schedules((interactive, arrivals_s), (batch, [BURST_AT_S] * len(batch)))
            server.run("burst", jobs, due_times_s)
    return _result(bench)


def _jobs(bench: Bench, classes: bool) -> tuple[list[Job], list[Job]]:
    """Return the interactive jobs and the jobs of the burst."""
    rng = random.Random(bench.seed)
    questions = workload.load(workload.DEMO_QUESTIONS)
    short = workload.choose(short_questions(questions), NUM_QUESTIONS, bench.seed)
    asked = workload.choose(short, bench.count(round(INTERACTIVE_RATE * INTERACTIVE_SECONDS)), bench.seed)
    interactive = [
        make_job(prompt, "interactive", workload.max_tokens(prompt, None), **_class("interactive", classes))
        for prompt in asked
    ]
    pool = rng.sample(questions, NUM_BATCH_PROMPTS)
    batch = [
        make_job(rng.choice(pool), "batch", BATCH_OUTPUT_TOKENS, ignore_eos=True, **_class("batch", classes))
        for _ in range(bench.count(NUM_BATCH))
    ]
    return interactive, batch


def _class(name: str, classes: bool) -> dict[str, str]:
    return {"priority_class": name} if classes else {}


def _result(bench: Bench) -> Result:
    trials = {trial.variant: trial for trial in bench.trials}
    table = Table(
        [
            "",
            "interactive: TTFT p50 / p99, ms",
            "interactive: latency p50 / p99, ms",
            "batch: finished",
            "batch: all done after, s",
            "output tok/s",
            "preemptions",
        ],
        [_row(variant, trial) for variant, trial in trials.items()],
    )
    load = (
        f"Short questions of class interactive, Poisson at {INTERACTIVE_RATE:g}/s for {INTERACTIVE_SECONDS:g} s; after "
        f"{BURST_AT_S:g} s {bench.count(NUM_BATCH)} requests of class batch at once, {BATCH_OUTPUT_TOKENS} output "
        "tokens each (`ignore_eos`). 128 slots, a cache of 16,384 tokens."
    )
    return Result(
        "A burst of batch work beside interactive users", load, {"The same load, four servers:": table}, _figure(trials)
    )


def _figure(trials: dict[str, Trial]) -> Figure:
    figure, (left, right) = panels(1, 2, 3.8)
    for (variant, trial), colour in zip(trials.items(), COLOURS, strict=False):
        records = measures.by_group(trial.records)["interactive"]
        x, y = [record.due_s for record in records], [record.ttft_s * 1e3 for record in records]
        left.plot(x, y, "o", markersize=2.5, color=colour, label=variant)
    logarithmic(left, 1)
    left.axvline(BURST_AT_S, color="black", linewidth=0.8, linestyle=":")
    left.set_title("Interactive requests (dotted: the burst arrives)")
    left.set_xlabel("second of arrival")
    left.set_ylabel("time to first token, ms, logarithmic")
    grouped_bars(right, ["batch all done"], {name: [_batch_s(trial)] for name, trial in trials.items()}, "{:.1f}")
    right.set_title("The burst")
    right.set_ylabel("seconds from its arrival")
    legend_below(figure, right)
    return figure


def _row(variant: str, trial: Trial) -> list[str | float]:
    interactive = _summary(trial, "interactive")
    batch = measures.by_group(trial.records)["batch"]
    return [
        variant,
        f"{interactive.ttft_ms.p50:,.0f} / {interactive.ttft_ms.p99:,.0f}",
        f"{interactive.latency_ms.p50:,.0f} / {interactive.latency_ms.p99:,.0f}",
        f"{sum(record.ok for record in batch)} of {len(batch)}",
        _batch_s(trial),
        summarize(trial.records, ServiceLevel()).output_tokens_per_s,
        int(trial.counters["vllm:num_preemptions_total"]),
    ]


def _batch_s(trial: Trial) -> float:
    return _summary(trial, "batch").span_s


def _summary(trial: Trial, group: str) -> Summary:
    return summarize(measures.by_group(trial.records)[group], ServiceLevel())
