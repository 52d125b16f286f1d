"""Short interactive requests beside long ones of a lower class that have aged enough to be served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Trial, make_job
from experiments.results import COLOURS, Result, Table, panels
from load_test import workload
from load_test.metrics import ServiceLevel, summarize
from load_test.runner import Job, Load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SLOTS = 16
NUM_CLIENTS, NUM_SHORT, SHORT_OUTPUT_TOKENS = 32, 3000, 8
NUM_LONG, LONG_OUTPUT_TOKENS, LONG_AT_S = 48, 700, 3.0
WARMUP_S = 1.0
NUM_QUESTIONS = 60


def run(bench: Bench) -> Result:
    with bench.serve("weights", f"model_config.decode_batch_size={NUM_SLOTS}") as server:
        short, long = (server.referenced(jobs) for jobs in _jobs(bench))
        server.run_concurrently(
            "inversion", (short, Load(concurrency=NUM_CLIENTS)), (long, Load([LONG_AT_S] * len(long)))
        )
    return _result(bench)


def _jobs(bench: Bench) -> tuple[list[Job], list[Job]]:
    """Return short jobs of class interactive, and long jobs of class standard."""
    questions = workload.choose(workload.load(workload.DEMO_QUESTIONS), NUM_QUESTIONS, bench.seed)
    short = [
        make_job(questions[number % len(questions)], "interactive", SHORT_OUTPUT_TOKENS, priority_class="interactive")
        for number in range(bench.count(NUM_SHORT))
    ]
    long = [
        make_job(questions[number % 16], "standard", LONG_OUTPUT_TOKENS, ignore_eos=True)
        for number in range(bench.count(NUM_LONG))
    ]
    return short, long


def _result(bench: Bench) -> Result:
    (trial,) = bench.trials
    groups = measures.by_group(trial.records)
    long_end_s = max(record.end_s for record in groups["standard"])
    short_end_s = max(record.end_s for record in groups["interactive"])
    until_s = min(long_end_s, short_end_s)
    header = ["", "interactive: requests/s", "interactive: TTFT p50 / p99 / most, ms", "standard: output tok/s"]
    spans = {"before": (WARMUP_S, LONG_AT_S), "beside the long answers": (LONG_AT_S, until_s)}
    rows = [[name, *_row(trial, *span)] for name, span in spans.items()]
    load = (
        f"{NUM_CLIENTS} clients of class interactive, one question after the other, {SHORT_OUTPUT_TOKENS} output "
        f"tokens; after {LONG_AT_S:g} s {len(groups['standard'])} requests of class standard at once, "
        f"{LONG_OUTPUT_TOKENS} output tokens each. {NUM_SLOTS} slots. The long answers were done "
        f"{long_end_s - LONG_AT_S:.1f} s after they were asked for, with "
        f"{int(trial.counters['vllm:num_preemptions_total'])} preemptions."
    )
    tables = {"The same server before and while the long answers are computed:": Table(header, rows)}
    return Result("Long answers that have waited beside short ones", load, tables, _figure(trial, int(until_s)))


def _row(trial: Trial, since_s: float, until_s: float) -> list[str | float]:
    groups = measures.by_group(trial.records)
    short = [record for record in groups["interactive"] if since_s <= record.sent_s < until_s]
    times_s = [time_s for record in groups["standard"] for time_s in record.token_times_s]
    num_tokens = sum(since_s <= time_s < until_s for time_s in times_s)
    ttft = summarize(short, ServiceLevel()).ttft_ms
    most = max((1e3 * record.ttft_s for record in short), default=0.0)
    return [
        len(short) / (until_s - since_s),
        f"{ttft.p50:,.0f} / {ttft.p99:,.0f} / {most:,.0f}" if short else "-",
        num_tokens / (until_s - since_s),
    ]


def _figure(trial: Trial, until_s: int) -> Figure:
    figure, (left, right) = panels(1, 2, 3.4)
    groups = measures.by_group(trial.records)
    ended = measures.per_second(groups["interactive"], until_s)
    left.step(range(until_s), ended, where="post", color=COLOURS[0])
    left.set_ylim(bottom=0)
    left.set_title("Interactive requests that ended in each second")
    points = [(record.sent_s, 1e3 * record.ttft_s) for record in groups["interactive"]]
    right.plot(*zip(*points, strict=True), "o", markersize=1.5, color=COLOURS[0])
    right.set_ylim(bottom=0)
    right.set_title("Time to first token of interactive requests, ms")
    for panel in (left, right):
        panel.axvline(LONG_AT_S, color="black", linewidth=0.8, linestyle=":")
        panel.set_xlabel("second (dotted: the long answers are asked for)")
    return figure
