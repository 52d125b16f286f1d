"""Throughput with speculative decoding relative to the same model without it.

    python performance/run.py speculation [--model FOLDER] [--pairs N] [--seconds S]

Two engines serve the same model, one with draft tokens and one without, each with a WorkAgent of its own. They take
turns at every piece of work. The result is the ratio of tokens per second within a pair: its median, with the 95 %
confidence interval of the median. All responses of a pair are compared; a difference ends the run.

    first time      one stream: questions with long answers, served for the first time
    repeated        the same questions once more
    predictable N   N streams at once of the same questions
    noise N         N streams at once, sampled at a temperature at which no draft token is accepted

`--method draft_model --set scheduler_config.draft_model_path=FOLDER` adds a draft model. With `--method none` neither
engine drafts: the distance of those ratios from 1 is the error of the others. The last lines are a table of ratios.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from harness.work_agent_start import started
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.offline import LLM
from load_test.workload import DEMO_QUESTIONS, load

MAX_TOKENS = 384
NOISE_TOKENS = 96
NUM_BLOCKS: Final = 4608
QUESTIONS: Final = 24
"""Questions of one stream, which are served twice."""
LEAST_PAIRS: Final = 6
"""Minimum number of pairs of each kind and size, without the first one."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with ExitStack() as agents:
        engines = [agents.enter_context(_engine(arguments, method)) for method in ("none", arguments.method)]
        questions = [each.text for each in load(DEMO_QUESTIONS) if len(each.reference) > 100]
        greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        single = [([text], greedy) for text in questions[: min(QUESTIONS, arguments.pairs)]]
        _measure("first time", engines, single, arguments.seconds)
        _measure("repeated", engines, single, arguments.seconds)
        cells: dict[tuple[str, int], str] = {}
        for count in arguments.rows:
            shifted = (
                [questions[(3 * pair + row) % len(questions)] for row in range(count)]
                for pair in range(arguments.pairs)
            )
            work: Iterable[Work] = ((prompts, greedy) for prompts in shifted)
            cells["predictable", count] = _measure(f"predictable {count}", engines, work, arguments.seconds)
        for count in arguments.rows:
            noise = SamplingParams(temperature=2.0, seed=count, max_tokens=NOISE_TOKENS, ignore_eos=True)
            texts = (_noise(engines[0], count, pair) for pair in range(arguments.pairs))
            work = ((prompts, noise) for prompts in texts)
            cells["noise", count] = _measure(f"noise {count}", engines, work, arguments.seconds)
    print("| tokens/s with draft tokens over without, at once | " + " | ".join(map(str, arguments.rows)) + " |")
    print("| --- " * (1 + len(arguments.rows)) + "|")
    for kind in ("predictable", "noise"):
        print(f"| {kind} | " + " | ".join(cells[kind, count] for count in arguments.rows) + " |")
    return 0


@contextmanager
def _engine(arguments: argparse.Namespace, method: str) -> Iterator[LLM]:
    """Start an engine with a WorkAgent and scheduling ahead, as in a server."""
    settings = arguments.set
    if method != "draft_model":
        settings = [each for each in settings if not each.startswith("scheduler_config.draft_model_path")]
    overrides = [
        f"scheduler_config.speculative_method={method}",
        f"model_config.decode_batch_size={max(arguments.rows)}",
        f"pa_config.num_blocks={NUM_BLOCKS}",
    ]
    llm = LLM(load_config(None, [*overrides, *settings], arguments.model))
    with started(llm.config) as agent:
        executor = RemoteExecutor(agent.channel, agent.buffers)
        llm.engine = build_engine(
            llm.config, agent.loaded.num_blocks, executor, llm.tokenizer, llm.metrics, llm._publish
        )
        yield llm


Work = tuple[Sequence[Any], SamplingParams]
"""Prompts and their sampling parameters."""


class Run(NamedTuple):
    """Measurement of one piece of work."""

    rate: float
    """Tokens per second."""
    cpu_s: float
    """CPU seconds of the master."""
    num_steps: int


def _measure(name: str, engines: Sequence[LLM], work: Iterable[Work], most: float) -> str:
    """Measure pairs of runs, print their summary without the first pair, and return the ratio for the table."""
    pairs = []
    started = time.perf_counter()
    for pair, (prompts, params) in enumerate(work):
        pairs.append(_compare(engines, prompts, params, pair))
        if len(pairs) > LEAST_PAIRS and time.perf_counter() - started > most:
            break
    return _show(name, pairs[1:], engines)


def _noise(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Return prompts of 32 random tokens."""
    drawn = np.random.default_rng(1000 * count + seed).integers(3, llm.model_spec.vocab_size, (count, 32))
    return [[int(token_id) for token_id in prompt] for prompt in drawn]


def _compare(engines: Sequence[LLM], prompts: Sequence[Any], params: SamplingParams, pair: int) -> list[Run]:
    """Run one piece of work without and with draft tokens; the order alternates."""
    runs: dict[int, Run] = {}
    answers = {}
    for index in (0, 1) if pair % 2 == 0 else (1, 0):
        engine = engines[index].engine
        num_steps, started, started_cpu = engine.num_steps, time.perf_counter(), time.thread_time()
        outputs = engines[index].generate(list(prompts), params)
        seconds, cpu_s = time.perf_counter() - started, time.thread_time() - started_cpu
        num_tokens = sum(len(output.token_ids) for output in outputs)
        runs[index] = Run(num_tokens / seconds, cpu_s, engine.num_steps - num_steps)
        answers[index] = [(output.text, output.token_ids, output.finish_reason) for output in outputs]
    if answers[0] != answers[1]:
        raise SystemExit("a response with draft tokens differs from the one without")
    return [runs[0], runs[1]]


def _show(name: str, pairs: Sequence[list[Run]], engines: Sequence[LLM]) -> str:
    ratios = sorted(drafting.rate / plain.rate for plain, drafting in pairs)
    low, high = _interval_of_median(len(ratios))
    ratio = f"{statistics.median(ratios):.2f} ({ratios[low]:.2f}-{ratios[high]:.2f})"
    plain, drafting = (statistics.median(run.rate for run in runs) for runs in zip(*pairs, strict=True))
    cpu, cpu_drafting = (
        1e6 * sum(run.cpu_s for run in runs) / sum(run.num_steps for run in runs) for runs in zip(*pairs, strict=True)
    )
    drafted, accepted = (
        _count(engines[1], f"vllm:spec_decode_num_{each}_tokens_total") for each in ("draft", "accepted")
    )
    print(
        f"{name:15} {plain:8.0f} tok/s, with draft tokens {drafting:8.0f}: {ratio} x in {len(pairs)} pairs;"
        f" master {cpu:.0f} us a step, {cpu_drafting:.0f} with; so far {drafted:.0f} draft tokens,"
        f" {accepted:.0f} accepted",
        flush=True,
    )
    return ratio


def _interval_of_median(count: int) -> tuple[int, int]:
    """Return the indices of sorted values that enclose the median with a confidence of 95 %, by ranks."""
    away = 0.98 * math.sqrt(count)
    return max(0, math.floor((count - 1) / 2 - away)), min(count - 1, math.ceil((count - 1) / 2 + away))


def _count(llm: LLM, counter: str) -> float:
    lines = llm.metrics.render()[0].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(counter))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo"), metavar="FOLDER", help="or `demo`")
    parser.add_argument("--pairs", type=int, default=1000, help="most pairs of each kind and size")
    parser.add_argument("--seconds", type=float, default=30.0, help="after which no further pair of a kind starts")
    parser.add_argument("--method", default="ngram", choices=("ngram", "draft_model", "none"))
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    arguments = parser.parse_args(argv)
    if arguments.pairs < 2:
        parser.error(f"argument --pairs: must be >= 2, because the first one is discarded. Given: {arguments.pairs}")
    return arguments
