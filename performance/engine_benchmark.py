"""Speed of the engine without a server: python performance/engine_benchmark.py --model FOLDER [--tests A,B,C,S,L]

    A   one stream: prompt 128 or --prompt, output 128; time to the first token, then tokens per second (median of
        runs), and what a step reads of the weights
    B   32 and 128 requests at once, the same lengths; output tokens per second, prefill included
    C   one prompt of 1,024 or --long-prompt, one output token: prompt tokens per second (median of runs)
    S   where a decode step's time goes, for one stream and for each size of test B: microseconds of each operator, of
        the graph around them, of scheduling, building, sampling and text, and of the way to a WorkAgent and back
    L   a WorkAgent's start: seconds and memory, beside reading the files and the memory that weights and cache take

Prompts are random token ids, answers greedy, the end of sequence is ignored. Beside each figure of A, B and C stands
the share of its limit: the time that reading every weight and context once and doing every product would take at the
bandwidth and the arithmetic peak measured right before and right after the run, the higher of each; of several runs the
median share. Of experts only those count that a step has chosen; with quantised weights the peak is that of what their
products multiply, for attention too. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from figures import Figure, greedy, random_prompts
from llm_serving.config import load_config
from llm_serving.core.enums import QuantizationName
from llm_serving.kernels import library
from llm_serving.offline import LLM
from load_benchmark import start_up
from lost_cores import LostCoresMeter
from machine_limits import Limits, StepCost, decode_seconds, prompt_seconds
from step_breakdown import step_breakdown

OUTPUT_LEN = 128


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    overrides = [
        f"model_config.model_dtype={arguments.dtype}",
        f"pa_config.num_blocks={arguments.num_blocks}",
        f"model_config.decode_batch_size={max(arguments.batch)}",
        f"quant_config.quantization={arguments.quantization or 'null'}",
        *arguments.set,
    ]
    config = load_config(None, overrides, arguments.model)
    figures: list[Figure] = []

    highest: dict[str, Limits] = {}

    def run(test: str, measure: Callable[[LimitsBeside], list[Figure]]) -> None:
        limits = LimitsBeside(partial(Limits.measure, arguments.dtype, config.quant.quantization))
        meter = LostCoresMeter()
        found = measure(limits)
        lost = meter.read()
        highest[test] = limits.highest
        print(highest[test])
        for figure in found:
            print(figure, flush=True)
        figures.extend(found)
        figures.append(Figure(test, "cores lost to other programs", lost.programs, "cores"))
        figures.append(Figure(test, "cores lost to the host", lost.host, "cores"))
        print(
            f"     lost meanwhile: {lost.programs:.2f} cores to other programs, {lost.host:.2f} to the host", flush=True
        )

    if "L" in arguments.tests:
        run("L", lambda _: start_up(config))
    if arguments.tests != ["L"]:
        llm = LLM(config)
        cost = StepCost(llm.model_spec, arguments.dtype, config.quant.quantization, config.quant.has_coded_cache)
        llm.generate(random_prompts(llm, 2, 16, 99), greedy(4))
        if "A" in arguments.tests:
            run("A", partial(single_stream, llm, arguments.runs, arguments.prompt, cost))
        if "B" in arguments.tests:
            for count in arguments.batch:
                run(f"B{count}", partial(batch, llm, count, arguments.prompt, cost))
        if "C" in arguments.tests:
            run("C", partial(prefill, llm, arguments.runs, arguments.long_prompt, cost))
        if "S" in arguments.tests:
            counts = (1, *arguments.batch)
            run("S", lambda _: step_breakdown(llm, counts, arguments.prompt, OUTPUT_LEN))
    if arguments.json is not None:
        document = {
            "settings": {name: str(value) for name, value in vars(arguments).items()},
            "limits": {test: asdict(each) for test, each in highest.items()},
            "figures": [asdict(figure) | {"share": figure.share} for figure in figures],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


class LimitsBeside:
    """What the machine can do right before and right after each run of a test: that changes within minutes."""

    def __init__(self, measure: Callable[[], Limits]) -> None:
        self._measure = measure
        self._latest = self.highest = measure()

    def after_a_run(self) -> Limits:
        """The higher of what was measured before and is measured now."""
        before, self._latest = self._latest, self._measure()
        self.highest = self.highest.better_of(self._latest)
        return before.better_of(self._latest)


def of_runs(test: str, quantity: str, unit: str, runs: Sequence[tuple[float, float]], *, less: bool = False) -> Figure:
    """The median value, with the limit of which it is the median share, of runs (value, limit)."""
    each = [Figure(test, quantity, value, unit, limit, less_is_better=less) for value, limit in runs]
    value = statistics.median(value for value, _ in runs)
    share = statistics.median(figure.share or 0.0 for figure in each)
    return Figure(test, quantity, value, unit, value * share if less else value / share, less_is_better=less)


def single_stream(llm: LLM, runs: int, length: int, cost: StepCost, limits: LimitsBeside) -> list[Figure]:
    """Test A."""
    first, rates, read = [], [], 0
    for run in range(runs):
        start = time.perf_counter()
        prompts = random_prompts(llm, 1, length, run)
        marks = [(time.perf_counter(), _weight_bytes()) for _ in llm.stream(prompts, greedy(OUTPUT_LEN))]
        beside = limits.after_a_run()
        times = [time for time, _ in marks]
        num_steps = OUTPUT_LEN - 1
        first.append((1e3 * (times[0] - start), 1e3 * prompt_seconds(beside, cost, 1, length)))
        least = decode_seconds(beside, cost, 1, length, length + num_steps)
        rates.append((num_steps / (times[-1] - times[0]), num_steps / least))
        read = _bytes_of_a_step([num_bytes for _, num_bytes in marks])
    return [
        of_runs("A", "time to first token", "ms", first, less=True),
        of_runs("A", "decode, one stream", "tok/s", rates),
        Figure("A", "weights read by a step", read / 1e6, "MB", cost.weight_bytes / 1e6, less_is_better=True),
    ]


def batch(llm: LLM, count: int, length: int, cost: StepCost, limits: LimitsBeside) -> list[Figure]:
    """Test B."""
    start = time.perf_counter()
    prompts = random_prompts(llm, count, length, count)
    pieces = [(len(piece.token_ids), _weight_bytes()) for _, piece in llm.stream(prompts, greedy(OUTPUT_LEN))]
    elapsed = time.perf_counter() - start
    beside = limits.after_a_run()
    num_tokens = sum(size for size, _ in pieces)
    cost = cost.reading(_bytes_of_a_step([num_bytes for _, num_bytes in pieces]))
    least = prompt_seconds(beside, cost, count, length)
    least += decode_seconds(beside, cost, count, length, length + OUTPUT_LEN - 1)
    return [Figure(f"B{count}", "output", num_tokens / elapsed, "tok/s", num_tokens / least)]


def prefill(llm: LLM, runs: int, length: int, cost: StepCost, limits: LimitsBeside) -> list[Figure]:
    """Test C."""
    rates = []
    for run in range(runs):
        start = time.perf_counter()
        llm.generate(random_prompts(llm, 1, length, run), greedy(1))
        rate = length / (time.perf_counter() - start)
        rates.append((rate, length / prompt_seconds(limits.after_a_run(), cost, 1, length)))
    return [of_runs("C", "prefill", "tok/s", rates)]


def _weight_bytes() -> int:
    """Bytes of the weights of all products so far."""
    return int(library.load().llm_num_weight_bytes())


def _bytes_of_a_step(counts: Sequence[int]) -> int:
    """Of most steps, from the counts at each token of a run, of which those of one step are the same."""
    read = np.diff(counts)
    return int(np.median(read[read > 0]))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="Hugging Face folder, or `demo`")
    parser.add_argument("--tests", type=lambda text: text.split(","), default=["A", "B", "C"], metavar="A,B,C")
    parser.add_argument("--batch", type=_integers, default=[32, 128], metavar="32,128", help="sizes of tests B and S")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quantization", choices=tuple(QuantizationName), help="how weights are kept")
    parser.add_argument("--num-blocks", type=int, default=2304, help="blocks of 16 tokens in the cache")
    parser.add_argument("--runs", type=int, default=3, help="runs of tests A and C, of which the median counts")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    parser.add_argument("--prompt", type=int, default=128, metavar="TOKENS", help="the prompts of tests A, B and S")
    parser.add_argument("--long-prompt", type=int, default=1024, metavar="TOKENS", help="the prompt of test C")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
