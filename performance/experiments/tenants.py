"""A tenant with a backlog of long prompts beside a tenant with short questions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Served, Trial, long_prompts, make_job, merge_schedules, short_questions
from experiments.results import COLOURS, Result, Table, grouped_bars, logarithmic, panels
from load_test import workload
from load_test.api_client import count_tokens
from load_test.metrics import ServiceLevel, Summary, summarize
from load_test.runner import Job, poisson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP_TOKENS = 512
VARIANTS = {
    "fair, capped": (True, STEP_TOKENS // 2),
    "fair, not capped": (True, STEP_TOKENS),
    "not fair, capped": (False, STEP_TOKENS // 2),
    "not fair, not capped": (False, STEP_TOKENS),
}
"""Variant -> (tenant_fairness, max_long_prefill_tokens)."""
NUM_SLOTS = 32
NUM_LONG, LONG_WORDS, LONG_OUTPUT_TOKENS = 60, 1500, 16
SHORT_RATE, SHORT_SECONDS = 20.0, 5.0
MAX_POINTS = 120


def run(bench: Bench) -> Result:
    num_prompt_tokens: dict[str, int] = {}
    due_times_s: list[float] = []
    for variant, (fair, cap) in VARIANTS.items():
        settings = (
            f"model_config.decode_batch_size={NUM_SLOTS}",
            "model_config.max_generate_length=2048",
            "pa_config.num_blocks=4096",
            f"scheduler_config.max_prefill_tokens={STEP_TOKENS}",
            f"scheduler_config.tenant_fairness={fair}",
            f"scheduler_config.max_long_prefill_tokens={cap}",
            "scheduler_config.prefix_caching=False",  # a prompt with a reference answer must be computed again
        )
        with bench.serve(variant, *settings) as server:
            long_jobs, short_jobs = (server.referenced(jobs) for jobs in _jobs(bench))
            num_prompt_tokens = num_prompt_tokens or _count_prompts(server, [*long_jobs, *short_jobs])
            arrivals_s = poisson(SHORT_RATE, len(short_jobs), bench.seed)
            jobs, due_times_s = merge_schedules((long_jobs, [0.0] * len(long_jobs)), (short_jobs, arrivals_s))
            server.run("both tenants", jobs, due_times_s)
    return _result(bench, num_prompt_tokens, due_times_s[-1])


def _jobs(bench: Bench) -> tuple[list[Job], list[Job]]:
    """Return the jobs of the tenant with long prompts and of the tenant with short questions."""
    rng = random.Random(bench.seed)
    questions = workload.load(workload.DEMO_QUESTIONS)
    backlog = long_prompts(questions, bench.count(NUM_LONG), LONG_WORDS, rng)
    long_jobs = [make_job(prompt, "long", LONG_OUTPUT_TOKENS, user="long", ignore_eos=True) for prompt in backlog]
    short = workload.choose(short_questions(questions), bench.count(round(SHORT_RATE * SHORT_SECONDS)), bench.seed)
    short_jobs = [make_job(prompt, "short", workload.max_tokens(prompt, None), user="short") for prompt in short]
    return long_jobs, short_jobs


def _count_prompts(server: Served, jobs: Sequence[Job]) -> dict[str, int]:
    async def count() -> dict[str, int]:
        return {job.prompt.text: await count_tokens(server.http, job.prompt.text) or 0 for job in jobs}

    return asyncio.run(count())


def _result(bench: Bench, num_prompt_tokens: dict[str, int], window_s: float) -> Result:
    trials = {trial.variant: trial for trial in bench.trials}
    rows: list[list[str | float]] = []
    for variant, trial in trials.items():
        short, long = (_summary(trial, tenant).ttft_ms for tenant in ("short", "long"))
        served = [_served(trial, tenant, num_prompt_tokens, window_s) for tenant in ("short", "long")]
        totals = [points[-1][1] if points else 0 for points in served]
        span_s = summarize(trial.records, ServiceLevel()).span_s
        cells = (f"{short.p50:,.0f} / {short.p99:,.0f}", f"{long.p50:,.0f} / {long.p99:,.0f}")
        rows.append([variant, *cells, *totals, span_s])
    table = Table(
        [
            "",
            "short: TTFT p50 / p99, ms",
            "long: TTFT p50 / p99, ms",
            f"short: tokens served in {window_s:.1f} s",
            f"long: tokens served in {window_s:.1f} s",
            "all done, s",
        ],
        rows,
    )
    records = next(iter(trials.values())).records
    groups = measures.by_group(records)
    mean_long = sum(num_prompt_tokens[record.prompt] for record in groups["long"]) / len(groups["long"])
    load = (
        f"One tenant sends {len(groups['long'])} prompts of {mean_long:,.0f} tokens (mean) at once, "
        f"{LONG_OUTPUT_TOKENS} output tokens each; the other {len(groups['short'])} short questions, Poisson at "
        f"{SHORT_RATE:g}/s. Steps of {STEP_TOKENS} tokens, {NUM_SLOTS} slots, no prefix caching; capped: a long prompt "
        f"takes at most {STEP_TOKENS // 2} tokens of a step while other requests wait."
    )
    figure = _figure(trials, num_prompt_tokens)
    return Result("A tenant of long prompts beside one of short ones", load, {"Both tenants:": table}, figure)


def _figure(trials: dict[str, Trial], num_prompt_tokens: dict[str, int]) -> Figure:
    figure, (left, right) = panels(1, 2, 3.6)
    spreads = {variant: _summary(trial, "short").ttft_ms for variant, trial in trials.items()}
    ttft = {"p50": [each.p50 for each in spreads.values()], "p99": [each.p99 for each in spreads.values()]}
    grouped_bars(left, [variant.replace(", ", ",\n") for variant in spreads], ttft, "{:,.0f}")
    left.set_title("Time to first token of the short tenant")
    logarithmic(left, 1)
    left.set_ylabel("ms, logarithmic")
    left.legend(frameon=False, loc="upper left", ncols=2)
    for variant, style in (("fair, capped", "-"), ("not fair, capped", "--")):
        for tenant, colour in zip(("short", "long"), COLOURS, strict=False):
            points = measures.thinned(_served(trials[variant], tenant, num_prompt_tokens, None), MAX_POINTS)
            name = f"{tenant}, {variant.partition(',')[0]}"
            right.plot([t for t, _ in points], [n for _, n in points], style, color=colour, label=name)
    logarithmic(right, 10)
    right.set_title("Tokens served")
    right.set_xlabel("seconds")
    right.set_ylabel("prompt and output tokens, logarithmic")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4, columnspacing=1.0)
    return figure


def _summary(trial: Trial, tenant: str) -> Summary:
    return summarize(measures.by_group(trial.records)[tenant], ServiceLevel())


def _served(
    trial: Trial, tenant: str, num_prompt_tokens: dict[str, int], until_s: float | None
) -> list[tuple[float, int]]:
    return measures.served_tokens(measures.by_group(trial.records)[tenant], num_prompt_tokens, until_s)
