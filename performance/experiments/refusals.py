"""Load shedding at twice the capacity, with clients that obey Retry-After."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Served, Trial, make_job
from experiments.measures import PHASES, FirstToken, first_tokens, worst_predictions
from experiments.results import COLOURS, Result, Table, panels
from load_test import workload
from load_test.metrics import RequestRecord, percentile
from load_test.runner import Job, poisson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_SLOTS = 32
MAX_QUEUE_LEN = 64
NUM_QUESTIONS = 408
NUM_FOR_CAPACITY = 400
MAX_TOKENS = 500
"""More than the tokens of any right answer."""
LOAD = 2.0
"""Offered load relative to the capacity."""
SECONDS = 20.0
"""Duration of the arrivals."""
MAX_RETRIES = 50
SLOTS = f"model_config.decode_batch_size={NUM_SLOTS}"
QUEUE = f"scheduler_config.max_waiting_queue={MAX_QUEUE_LEN}"
GROUP = "question"


def run(bench: Bench) -> Result:
    with bench.serve("without refusals", SLOTS) as server:
        capacity = _measure_capacity(server)
    num = bench.count(round(LOAD * capacity * SECONDS))
    explained = f"serving_config.explain_requests={num}"
    with bench.serve("refusals", SLOTS, QUEUE, explained) as server:
        server = replace(server, options=replace(server.options, max_retries=MAX_RETRIES))
        trial = server.run(
            "twice the capacity", server.referenced(_jobs(bench, num)), poisson(LOAD * capacity, num, bench.seed)
        )
        found = asyncio.run(first_tokens(server.http, [record for record in trial.records if record.ok]))
    return _result(trial, found, capacity)


def _jobs(bench: Bench, num: int) -> list[Job]:
    questions = workload.choose(workload.load(workload.DEMO_QUESTIONS), bench.count(NUM_QUESTIONS), bench.seed)
    chosen = workload.choose(questions, num, bench.seed)
    return [make_job(each, GROUP, min(MAX_TOKENS, workload.max_tokens(each, None))) for each in chosen]


def _measure_capacity(server: Served) -> float:
    """Return the requests per second with all slots occupied."""
    jobs = server.referenced(_jobs(server.bench, server.bench.count(NUM_FOR_CAPACITY)))
    return measures.saturated_rate(server.run("capacity", jobs, [0.0] * len(jobs)).records)


def _result(trial: Trial, found: Sequence[FirstToken], capacity: float) -> Result:
    records = [record for record in trial.records if record.ok]
    refused = [record for record in records if len(record.attempts) > 1]
    delays_s = sorted(a.retry_after_s for record in records for a in record.attempts if a.retry_after_s is not None)
    last_due = max(record.due_s for record in records)
    under_load = [each for each in found if each.sent_s <= last_due]
    refusals = Table(
        [
            "offered, requests/s",
            "requests",
            "refused at least once",
            "of them admitted at the first retry",
            "refusals",
            "Retry-After p50 / p99 / most, s",
            "most refusals of one request",
        ],
        [
            [
                len(records) / last_due,
                len(records),
                len(refused),
                f"{measures.first_retry_share(records):.1%}",
                len(delays_s),
                f"{percentile(delays_s, 50):.0f} / {percentile(delays_s, 99):.0f} / {max(delays_s, default=0.0):.0f}",
                max(len(record.attempts) - 1 for record in records),
            ]
        ],
    )
    accuracy = Table(
        [
            "from / to the first token",
            "requests",
            "predicted p50, ms",
            "real p50, ms",
            "median error",
            "p99 factor",
            "later / sooner p99",
        ],
        [
            _accuracy_row("admitted during the arrivals", _by_client(under_load)),
            _accuracy_row("the same, by the server's clock", _by_server(under_load)),
            _accuracy_row("admitted, all", _by_client(found)),
            _accuracy_row("the same, by the server's clock", _by_server(found)),
            _accuracy_row("first refusal", measures.predicted_after_refusal(records)),
        ],
    )
    load = (
        f"Capacity with all {NUM_SLOTS} slots taken: {capacity:.1f} requests/s; {MAX_QUEUE_LEN} may wait. Poisson "
        f"arrivals at {LOAD:g} times that for {last_due:.0f} s, the demo model's {NUM_QUESTIONS} questions in random "
        "order, greedy, streamed. Every client waits for `Retry-After` and retries the same request, "
        f"without a client identity. {trial.client_cpu_share:.0%} of one core went to the clients."
    )
    tables = {
        "Refusals:": refusals,
        "Predicted (`x-predicted-ttft-ms`) against measured, by the client's clock unless stated otherwise:": accuracy,
        "The worst 1 % of predictions, and the phase that took most of their time:": _causes(found),
    }
    return Result("Load shedding under competition", load, tables, _figure(records))


def _accuracy_row(name: str, pairs: Sequence[tuple[float, float]]) -> Sequence[str | float]:
    accuracy = measures.Accuracy.of(pairs)
    predicted, real = (percentile(sorted(1e3 * each[side] for each in pairs), 50) for side in (0, 1))
    ways = f"{accuracy.p99_later:.2f} / {accuracy.p99_sooner:.2f}"
    return [name, accuracy.num, predicted, real, f"{accuracy.median_error:.1%}", f"{accuracy.p99_factor:.2f}", ways]


def _by_client(found: Sequence[FirstToken]) -> list[tuple[float, float]]:
    return [(each.predicted_s, each.seen_s) for each in found]


def _by_server(found: Sequence[FirstToken]) -> list[tuple[float, float]]:
    return [(each.predicted_s, each.real_s) for each in found]


def _causes(found: Sequence[FirstToken]) -> Table:
    """Return a table of mean times by cause."""
    headers = [
        "cause",
        "requests",
        "factor",
        "predicted, ms",
        "client, ms",
        "server, ms",
        *(f"{p}, ms" for p in PHASES),
    ]
    chosen = worst_predictions(found)
    rows: list[Sequence[str | float]] = []
    for cause, num in Counter(each.cause for each in chosen).most_common():
        same = [each for each in chosen if each.cause == cause]
        times_s = [
            (each.predicted_s, each.seen_s, each.real_s, *map(each.spent_s.__getitem__, PHASES)) for each in same
        ]
        means_ms = [1e3 * sum(column) / num for column in zip(*times_s, strict=True)]
        rows.append([cause, num, sum(each.factor for each in same) / num, *means_ms])
    return Table(headers, rows)


def _figure(records: Sequence[RequestRecord]) -> Figure:
    figure, (left, right) = panels(1, 2, 3.8)
    for name, colour, chosen in (
        ("admitted at the first retry", COLOURS[0], [r for r in records if len(r.attempts) == 2]),
        ("refused again", COLOURS[3], [r for r in records if len(r.attempts) > 2]),
    ):
        times = [record.attempts[0].sent_s for record in chosen]
        delays_s = [record.attempts[0].retry_after_s or 0.0 for record in chosen]
        left.plot(times, delays_s, ".", markersize=2.5, color=colour, label=name)
    left.set_title("Retry-After at the first refusal")
    left.set_xlabel("arrival, s")
    left.set_ylabel("s")
    left.legend(frameon=False, markerscale=3)
    _scatter(right, "admitted", COLOURS[0], measures.predicted_after_admission(records))
    _scatter(right, "refused first", COLOURS[1], measures.predicted_after_refusal(records))
    right.set_title("Time to first token, predicted and measured")
    right.set_xlabel("predicted, s")
    right.set_ylabel("measured, s")
    right.legend(frameon=False, markerscale=3)
    return figure


def _scatter(panel: Axes, name: str, colour: str, pairs: Sequence[tuple[float, float]]) -> None:
    panel.loglog(
        [each[0] for each in pairs], [each[1] for each in pairs], ".", markersize=2.5, color=colour, label=name
    )
    if pairs:
        ends = [min(each[0] for each in pairs), max(each[0] for each in pairs)]
        for factor in (0.5, 1.0, 2.0):
            panel.plot(ends, [factor * end for end in ends], color="grey", linewidth=0.8, alpha=0.6)
