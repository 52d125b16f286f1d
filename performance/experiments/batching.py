"""Static against continuous batching, with answers of very different lengths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Trial, draw_groups, make_job
from experiments.results import Result, Table, grouped_bars, legend_below, logarithmic, panels
from load_test import workload
from load_test.metrics import ServiceLevel, Summary, summarize
from load_test.runner import Job, fixed, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATIC = "static, 8 slots"
VARIANTS = {
    STATIC: (8, "static"),
    "continuous, 8 slots": (8, "continuous"),
    "continuous, 128 slots": (128, "continuous"),
}
LENGTHS = {"short": 10, "medium": 50, "long": 200}
"""Output tokens of each length class."""
WEIGHTS = {"short": 0.1, "medium": 0.8, "long": 0.1}
POOL = {"short": 4, "medium": 12, "long": 4}
"""Distinct prompts of each length, whose reference answers are generated first."""
NUM_AT_ONCE = 140
NUM_OPEN_LOOP = 60
SHARE_OF_CAPACITY = 0.9
WAVES = (20, 50, 100)
GAP_S = 0.05


def run(bench: Bench) -> Result:
    jobs = _jobs(bench)
    rate = 0.0
    for variant, (num_slots, strategy) in VARIANTS.items():
        settings = (
            f"model_config.batching_strategy={strategy}",
            f"model_config.decode_batch_size={num_slots}",
        )
        with bench.serve(variant, *settings) as server:
            jobs = server.referenced(jobs)
            at_once = server.run("at once", jobs, [0.0] * len(jobs))
            # The first variant, static batching, decides the rate for all.
            rate = rate or SHARE_OF_CAPACITY * _summary(at_once).requests_per_s
            num_open = min(len(jobs), bench.count(NUM_OPEN_LOOP))
            server.run("open loop", jobs[:num_open], poisson(rate, num_open, bench.seed))
            for num in WAVES:
                server.run(f"wave of {num}", jobs[:num], fixed(1 / GAP_S, min(num, len(jobs))))
    return _result(bench, len(jobs), rate)


def _jobs(bench: Bench) -> list[Job]:
    rng = random.Random(bench.seed)
    questions = workload.choose(workload.load(workload.DEMO_QUESTIONS), sum(POOL.values()), bench.seed)
    pool = {name: [questions.pop() for _ in range(num)] for name, num in POOL.items()}
    lengths = draw_groups(bench.count(NUM_AT_ONCE), WEIGHTS, rng)
    return [make_job(rng.choice(pool[name]), name, LENGTHS[name], ignore_eos=True) for name in lengths]


def _result(bench: Bench, num_jobs: int, rate: float) -> Result:
    trials = {(trial.variant, trial.load): trial for trial in bench.trials}
    throughput = Table(
        [
            "",
            "requests/s",
            "output tok/s",
            "mean latency, ms",
            f"mean latency at {rate:.1f} requests/s, ms",
            "idle slots",
        ],
        [_throughput_row(trials, variant) for variant in VARIANTS],
    )
    ttft = {variant: [_ttft(trials, variant, num) for num in WAVES] for variant in VARIANTS}
    waves: list[Sequence[str | float]] = [[variant, *values] for variant, values in ttft.items()]
    waves += [_ratios(ttft, variant) for variant in VARIANTS if variant != STATIC]
    load = (
        f"{num_jobs} requests, 10 % with {LENGTHS['short']} output tokens, 80 % with {LENGTHS['medium']}, 10 % with "
        f"{LENGTHS['long']} (`ignore_eos`), prompts of the "
        f"demo model's questions; at once, then Poisson at {SHARE_OF_CAPACITY:.0%} of what static batching sustained, "
        f"then waves of requests {GAP_S * 1e3:.0f} ms apart."
    )
    wave_table = Table(["", *(f"{num} requests" for num in WAVES)], waves)
    titles = {"All at once, and an open loop:": throughput, "Mean time to first token in a wave, ms:": wave_table}
    return Result("Static against continuous batching", load, titles, _figure(trials, rate, ttft))


def _figure(trials: dict[tuple[str, str], Trial], rate: float, ttft: dict[str, list[float]]) -> Figure:
    figure, (left, middle, right) = panels(1, 3, 3.4)
    at_once = {variant: _summary(trials[variant, "at once"]) for variant in VARIANTS}
    open_loop = {variant: _summary(trials[variant, "open loop"]) for variant in VARIANTS}
    grouped_bars(left, ["all at once"], {name: [each.requests_per_s] for name, each in at_once.items()})
    left.set_title("Throughput")
    left.set_ylabel("requests/s")
    latency = {name: [at_once[name].latency_ms.mean, open_loop[name].latency_ms.mean] for name in VARIANTS}
    grouped_bars(middle, ["all at once", f"{rate:.1f} requests/s"], latency, "{:,.0f}")
    middle.set_title("Mean latency")
    middle.set_ylabel("ms")
    grouped_bars(right, [str(num) for num in WAVES], ttft, "{:,.0f}")
    logarithmic(right, 1)
    right.set_title("Mean time to first token")
    right.set_xlabel(f"requests, {GAP_S * 1e3:.0f} ms apart")
    right.set_ylabel("ms, logarithmic")
    legend_below(figure, left)
    return figure


def _throughput_row(trials: dict[tuple[str, str], Trial], variant: str) -> Sequence[str | float]:
    at_once, open_loop = trials[variant, "at once"], trials[variant, "open loop"]
    summary = _summary(at_once)
    idle = measures.idle_share(summary.num_output_tokens, at_once.steps, VARIANTS[variant][0])
    return [
        variant,
        summary.requests_per_s,
        summary.output_tokens_per_s,
        summary.latency_ms.mean,
        _summary(open_loop).latency_ms.mean,
        f"{idle:.0%}",
    ]


def _ttft(trials: dict[tuple[str, str], Trial], variant: str, num: int) -> float:
    return _summary(trials[variant, f"wave of {num}"]).ttft_ms.mean


def _ratios(ttft: dict[str, list[float]], variant: str) -> list[str | float]:
    ratios = (f"{static / other:.1f} x" for static, other in zip(ttft[STATIC], ttft[variant], strict=True))
    return [f"{STATIC} / {variant}", *ratios]


def _summary(trial: Trial) -> Summary:
    return summarize(trial.records, ServiceLevel())
