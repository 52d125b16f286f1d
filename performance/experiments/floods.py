"""Streams beside a flood of long prompts: inter-token latency and prompt throughput by token budget."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

from experiments import measures
from experiments.bench import Bench, Trial, long_prompts, make_job
from experiments.results import COLOURS, Result, Table, panels
from load_test import workload
from load_test.metrics import Distribution, ServiceLevel, Summary, summarize
from load_test.runner import Job, Load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = "prefill_first, as it comes"
VARIANTS: dict[str, tuple[str, ...]] = {
    DEFAULT: (),
    "mixed": ("scheduler_config.policy=mixed",),
    **{
        f"prefill_first, {budget} tokens, gap {gap}": (
            f"scheduler_config.max_prefill_tokens={budget}",
            f"scheduler_config.max_consecutive_prefill_steps={gap}",
        )
        for budget, gap in ((2048, 1), (2048, 2), (2048, 4), (512, 1), (512, 4), (256, 1))
    },
}
"""Variant -> settings."""
NUM_SLOTS = 32
NUM_STREAMS, NUM_RECITATIONS, NUM_ANSWERS, MAX_ANSWER_TOKENS = 8, 12, 48, 400
NUM_PROMPTS, PROMPT_WORDS, PROMPT_OUTPUT_TOKENS, NUM_SENDERS = 160, 870, 4, 8


def run(bench: Bench) -> Result:
    for variant, settings in VARIANTS.items():
        common = (
            f"model_config.decode_batch_size={NUM_SLOTS}",
            "pa_config.num_blocks=4096",
            "scheduler_config.prefix_caching=False",  # a prompt with a reference answer must be computed again
        )
        with bench.serve(variant, *common, *settings) as server:
            streams, prompts = (server.referenced(jobs) for jobs in _jobs(bench))
            server.run_concurrently(
                "flood", (streams, Load(concurrency=NUM_STREAMS)), (prompts, Load(concurrency=NUM_SENDERS))
            )
    return _result(bench)


def _jobs(bench: Bench) -> tuple[list[Job], list[Job]]:
    """Return the jobs of the streams and the jobs of the flood."""
    questions = workload.load(workload.DEMO_QUESTIONS)
    # Every token has text, so that the client sees when it arrives.
    longest = sorted(questions, key=lambda prompt: len(prompt.reference), reverse=True)[:NUM_RECITATIONS]
    streams = [
        make_job(prompt, "stream", MAX_ANSWER_TOKENS)
        for prompt in itertools.islice(itertools.cycle(longest), bench.count(NUM_ANSWERS))
    ]
    flood = long_prompts(questions, bench.count(NUM_PROMPTS), PROMPT_WORDS, random.Random(bench.seed))
    return streams, [make_job(prompt, "flood", PROMPT_OUTPUT_TOKENS, ignore_eos=True) for prompt in flood]


def _result(bench: Bench) -> Result:
    trials = {trial.variant: trial for trial in bench.trials}
    header = ["", "streams: ITL p50 / p99, ms", "ITL p99 / that of mixed", "flood: TTFT p50 / p99, ms", "prompts/s"]
    mixed = _itl(trials["mixed"]).p99
    rows: list[list[str | float]] = []
    for variant, trial in trials.items():
        itl, ttft = _itl(trial), _flood(trial).ttft_ms
        rows.append(
            [
                variant,
                f"{itl.p50:,.1f} / {itl.p99:,.1f}",
                itl.p99 / mixed,
                f"{ttft.p50:,.0f} / {ttft.p99:,.0f}",
                _flood(trial).requests_per_s,
            ]
        )
    load = (
        f"{NUM_STREAMS} clients with the longest answers of the demo model, streamed, and meanwhile "
        f"{bench.count(NUM_PROMPTS)} prompts of about 900 tokens by {NUM_SENDERS} clients, {PROMPT_OUTPUT_TOKENS} "
        f"output tokens each; all of class standard. {NUM_SLOTS} slots; a gap is `max_consecutive_prefill_steps`, "
        "tokens are `max_prefill_tokens`. Gaps between tokens count while the flood lasts."
    )
    return Result(
        "Streams beside a flood of long prompts", load, {"The same load:": Table(header, rows)}, _figure(trials)
    )


def _itl(trial: Trial) -> Distribution:
    groups = measures.by_group(trial.records)
    end_s = max(record.end_s for record in groups["flood"])
    return Distribution.of(measures.gaps_ms(groups["stream"], end_s))


def _flood(trial: Trial) -> Summary:
    return summarize(measures.by_group(trial.records)["flood"], ServiceLevel())


def _figure(trials: dict[str, Trial]) -> Figure:
    figure, (panel,) = panels(1, 1, 4.2)
    for variant, trial in trials.items():
        x, y = _flood(trial).ttft_ms.p50, _itl(trial).p99
        chosen = variant in (DEFAULT, "mixed")
        panel.plot([x], [y], "D" if chosen else "o", color=COLOURS[0 if variant == "mixed" else 1 if chosen else 2])
        below = variant == DEFAULT  # as close to one of the other variants
        at, name = (4, -9 if below else 3), variant.removeprefix("prefill_first, ")
        panel.annotate(name, (x, y), at, textcoords="offset points", fontsize=7)
    panel.set_xlim(left=0)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("flood: time to first token p50, ms")
    panel.set_ylabel("streams: time between tokens p99, ms")
    panel.set_title("What the smoothness of streams costs prompts")
    return figure
