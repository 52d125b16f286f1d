"""Refusal under competition: twice what the server can do, and clients that come back when they are told to."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import workload
from arrivals import poisson
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from metrics import percentile
from records import RequestRecord
from runner import Job

from experiments import loads, measures
from experiments.bench import Bench, Served, Trial
from experiments.first_tokens import PLACES, FirstToken, first_tokens, worst
from experiments.plots import COLOURS, panels
from experiments.results import Result, Table

NUM_SLOTS = 32
NUM_PLACES = 64
NUM_QUESTIONS = 408
NUM_FOR_CAPACITY = 400
MAX_TOKENS = 500
"""Longer than any right answer."""
LOAD = 2.0
"""Times the capacity."""
SECONDS = 20.0
"""Of arrivals."""
MAX_RETRIES = 50
SLOTS = f"model_config.decode_batch_size={NUM_SLOTS}"
QUEUE = f"scheduler_config.max_waiting_queue={NUM_PLACES}"
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
    return [loads.job(each, GROUP, min(MAX_TOKENS, workload.max_tokens(each, None))) for each in chosen]


def _measure_capacity(server: Served) -> float:
    """Requests a second while all slots are taken."""
    jobs = server.referenced(_jobs(server.bench, server.bench.count(NUM_FOR_CAPACITY)))
    return measures.saturated_rate(server.run("capacity", jobs, [0.0] * len(jobs)).records)


def _result(trial: Trial, found: Sequence[FirstToken], capacity: float) -> Result:
    records = [record for record in trial.records if record.ok]
    refused = [record for record in records if len(record.attempts) > 1]
    told = sorted(a.retry_after_s for record in records for a in record.attempts if a.retry_after_s is not None)
    last_due = max(record.due_s for record in records)
    under_load = [each for each in found if each.sent_s <= last_due]
    refusals = Table(
        [
            "offered, requests/s",
            "requests",
            "refused once and more",
            "of them let in when they came back",
            "refusals",
            "Retry-After p50 / p99 / most, s",
            "most refusals of one request",
        ],
        [
            [
                len(records) / last_due,
                len(records),
                len(refused),
                f"{measures.first_time_share(records):.1%}",
                len(told),
                f"{percentile(told, 50):.0f} / {percentile(told, 99):.0f} / {max(told, default=0.0):.0f}",
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
            _accuracy_row("let in, while others arrive", _by_client(under_load)),
            _accuracy_row("the same, by the server's clock", _by_server(under_load)),
            _accuracy_row("let in, all", _by_client(found)),
            _accuracy_row("the same, by the server's clock", _by_server(found)),
            _accuracy_row("first refusal", measures.told_and_returned(records)),
        ],
    )
    load = (
        f"Capacity with all {NUM_SLOTS} slots taken: {capacity:.1f} requests/s; {NUM_PLACES} may wait. Poisson "
        f"arrivals at {LOAD:g} times that for {last_due:.0f} s, the demo model's {NUM_QUESTIONS} questions in random "
        "order, greedy, streamed. Every client waits as long as `Retry-After` says and sends the same request again, "
        f"without telling who it is. {trial.client_cpu_share:.0%} of one core went to the clients."
    )
    tables = {
        "Refusals:": refusals,
        "Predicted (`x-predicted-ttft-ms`) against real, by the client's clock where nothing else is said:": accuracy,
        "The predictions that were farthest off, one in a hundred, and where most of their time went:": _causes(found),
    }
    return Result("Refusal under competition", load, tables, _figure(records))


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
    """Means over those with the same cause."""
    headers = [
        "cause",
        "requests",
        "factor",
        "predicted, ms",
        "client, ms",
        "server, ms",
        *(f"{p}, ms" for p in PLACES),
    ]
    chosen = worst(found)
    rows: list[Sequence[str | float]] = []
    for cause, num in Counter(each.cause for each in chosen).most_common():
        alike = [each for each in chosen if each.cause == cause]
        times_s = [
            (each.predicted_s, each.seen_s, each.real_s, *map(each.spent_s.__getitem__, PLACES)) for each in alike
        ]
        means_ms = [1e3 * sum(column) / num for column in zip(*times_s, strict=True)]
        rows.append([cause, num, sum(each.factor for each in alike) / num, *means_ms])
    return Table(headers, rows)


def _figure(records: Sequence[RequestRecord]) -> Figure:
    figure, (left, right) = panels(1, 2, 3.8)
    for name, colour, chosen in (
        ("let in when it came back", COLOURS[0], [r for r in records if len(r.attempts) == 2]),
        ("refused again", COLOURS[3], [r for r in records if len(r.attempts) > 2]),
    ):
        times = [record.attempts[0].sent_s for record in chosen]
        told = [record.attempts[0].retry_after_s or 0.0 for record in chosen]
        left.plot(times, told, ".", markersize=2.5, color=colour, label=name)
    left.set_title("Retry-After at the first refusal")
    left.set_xlabel("arrival, s")
    left.set_ylabel("s")
    left.legend(frameon=False, markerscale=3)
    _scatter(right, "let in", COLOURS[0], measures.told_and_waited(records))
    _scatter(right, "refused, coming back", COLOURS[1], measures.told_and_returned(records))
    right.set_title("Time to first token, predicted and real")
    right.set_xlabel("predicted, s")
    right.set_ylabel("real, s")
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
