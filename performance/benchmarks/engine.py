"""Throughput and latency of the engine without a server, beside the limits of the machine.

    python performance/run.py engine --model FOLDER [--tests A,B,C,S,L]

    A   one stream, prompt 128 (or --prompt), output 128: time to first token, then tokens per second (median of the
        runs), and the bytes of weights that a step reads
    B   32 and 128 requests at once, the same lengths: output tokens per second, prefill included
    C   one prompt of 1,024 (or --long-prompt), one output token: prompt tokens per second (median of the runs)
    S   breakdown of a decode step, for one stream and for each size of test B: microseconds of each operator, of the
        graph around them, of scheduling, step building, sampling and detokenizing, and of the transport
    L   start of a WorkAgent: seconds and memory, beside the time to read the files and the size of weights and cache

Prompts are random token ids, decoding is greedy, the end-of-sequence token is ignored. Each figure of A, B and C is
shown with the share of its limit that it reaches. The limit is the time to read every weight and every context once and
to compute every product, at the memory bandwidth and arithmetic peak measured right before and right after the run
(the higher of the two). For several runs the median share is shown. For a mixture of experts, only the chosen experts
count. With quantized weights, the peak of products is that of the type they multiply. Attention multiplies the model
dtype, or int8 with an int8 KV cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.figures import Figure, Stopwatch, greedy, random_prompts
from harness.machine_limits import BLOCKS, Limits, LostCoresMeter, StepCost, decode_seconds, prompt_seconds
from harness.work_agent_start import start_up, started
from llm_serving.config import load_config
from llm_serving.core.enums import QuantizationName
from llm_serving.engine import engine as engine_loop
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.kernels import library
from llm_serving.offline import LLM
from llm_serving.worker import model_runner

OUTPUT_LEN = 128

TESTS = ("A", "B", "C", "S", "L")


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

    quant = config.quant
    is_gguf = arguments.model.suffix == ".gguf"
    weights = BLOCKS if is_gguf and quant.quantization is None else quant.quantization
    measured = partial(Limits.measure, arguments.dtype, weights, int8_kv_cache=quant.has_int8_kv_cache)
    highest: dict[str, Limits] = {}

    def run(test: str, measure: Callable[[SurroundingLimits], list[Figure]]) -> None:
        limits = SurroundingLimits(measured)
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
        cost = StepCost(llm.model_spec, arguments.dtype, weights, quant.has_int8_kv_cache)
        read = [_weight_bytes() for _ in llm.stream(random_prompts(llm, 2, 16, 99), greedy(4))]
        if weights in (BLOCKS, QuantizationName.BLOCKS_A16):
            cost = replace(cost, counted_bytes=_bytes_of_a_step(read))
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


class SurroundingLimits:
    """Limits of the machine right before and right after each run of a test; they change within minutes."""

    def __init__(self, measure: Callable[[], Limits]) -> None:
        self._measure = measure
        self._latest = self.highest = measure()

    def after_a_run(self) -> Limits:
        """Return the higher of the limits measured before and after the run."""
        before, self._latest = self._latest, self._measure()
        self.highest = self.highest.better_of(self._latest)
        return before.better_of(self._latest)


def of_runs(test: str, quantity: str, unit: str, runs: Sequence[tuple[float, float]], *, less: bool = False) -> Figure:
    """Return the median value of runs (value, limit), with the limit that gives the median share."""
    each = [Figure(test, quantity, value, unit, limit, less_is_better=less) for value, limit in runs]
    value = statistics.median(value for value, _ in runs)
    share = statistics.median(figure.share or 0.0 for figure in each)
    return Figure(test, quantity, value, unit, value * share if less else value / share, less_is_better=less)


def single_stream(llm: LLM, runs: int, length: int, cost: StepCost, limits: SurroundingLimits) -> list[Figure]:
    """Run test A."""
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


def batch(llm: LLM, count: int, length: int, cost: StepCost, limits: SurroundingLimits) -> list[Figure]:
    """Run test B."""
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


def prefill(llm: LLM, runs: int, length: int, cost: StepCost, limits: SurroundingLimits) -> list[Figure]:
    """Run test C."""
    rates = []
    for run in range(runs):
        start = time.perf_counter()
        llm.generate(random_prompts(llm, 1, length, run), greedy(1))
        rate = length / (time.perf_counter() - start)
        rates.append((rate, length / prompt_seconds(limits.after_a_run(), cost, 1, length)))
    return [of_runs("C", "prefill", "tok/s", rates)]


def _weight_bytes() -> int:
    """Return the bytes of weights that all products have read so far."""
    return int(library.load().llm_num_weight_bytes())


def _bytes_of_a_step(counts: Sequence[int]) -> int:
    """Return the bytes of a typical step from the counts at each token; tokens of one step have the same count."""
    read = np.diff(counts)
    return int(np.median(read[read > 0]))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="Hugging Face folder, or `demo`")
    parser.add_argument("--tests", type=_tests, default=["A", "B", "C"], metavar="A,B,C")
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


def _tests(text: str) -> list[str]:
    tests = text.split(",")
    if not set(tests) <= set(TESTS):
        raise argparse.ArgumentTypeError(
            f"must be one or more of {', '.join(TESTS)}, separated by commas. Given: {text}"
        )
    return tests


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


SAMPLING_OPERATOR = "sample"


def step_breakdown(llm: LLM, counts: Sequence[int], prompt_len: int, output_len: int) -> list[Figure]:
    """Run test S: the mean decode step in microseconds for each number of requests, in process and with a WorkAgent."""
    figures, local_step = [], {}
    for count in counts:
        watch = Stopwatch()
        with watch.on(*_timed_functions(llm.engine)):
            total, num_steps = _decode(llm, count, prompt_len, output_len, watch, profiled=True)
        operators = {each.name: each.seconds for each in library.operator_times() if each.calls}
        operators.pop(SAMPLING_OPERATOR, None)  # called by Python and not by the graph, so it is part of sampling
        parts = {f"operator {name}": seconds for name, seconds in operators.items()}
        parts["graph around the operators"] = watch.seconds.pop("network") - sum(operators.values())
        parts |= watch.seconds
        parts["the rest of the loop"] = total - sum(parts.values())
        figures += [Figure(f"S{count}", name, 1e6 * part / num_steps, "us/step") for name, part in parts.items()]
        seconds, num_steps = _decode(llm, count, prompt_len, output_len)
        local_step[count] = seconds / num_steps
        figures.append(Figure(f"S{count}", "whole step, untimed inside", 1e6 * local_step[count], "us/step"))
    return figures + _behind_a_work_agent(llm, local_step, prompt_len, output_len)


def _behind_a_work_agent(llm: LLM, local_step: dict[int, float], prompt_len: int, output_len: int) -> list[Figure]:
    """Measure the same steps through socket and shared memory: one at a time, and one step ahead of the WorkAgent."""
    figures = []
    local_engine = llm.engine
    with started(llm.config) as agent:
        executor = RemoteExecutor(agent.channel, agent.buffers)
        for ahead in (False, True):
            config = replace(llm.config, scheduler=replace(llm.config.scheduler, async_scheduling=ahead))
            llm.engine = build_engine(
                config, agent.loaded.num_blocks, executor, llm.tokenizer, llm.metrics, llm._publish
            )
            _decode(llm, 1, 16, 8)
            for count in local_step:
                watch = Stopwatch()
                with watch.on((executor, "submit", "sending the step"), (executor, "collect", "waiting for its reply")):
                    seconds, num_steps = _decode(llm, count, prompt_len, output_len, watch)
                way = "one step ahead" if ahead else "one at a time"
                figures.append(Figure(f"S{count}", f"WorkAgent, {way}", 1e6 * seconds / num_steps, "us/step"))
                figures += [
                    Figure(f"S{count}", f"WorkAgent, {way}: {name}", 1e6 * part / num_steps, "us/step")
                    for name, part in watch.seconds.items()
                ]
                if not ahead:
                    transport = seconds / num_steps - local_step[count]
                    figures.append(Figure(f"S{count}", "transport: the difference", 1e6 * transport, "us/step"))
    llm.engine = local_engine
    return figures


def _timed_functions(engine: engine_loop.Engine) -> list[tuple[Any, str, str]]:
    """Return (owner, attribute, name) of the timed parts of a step."""
    runner = engine.executor._runner  # type: ignore[attr-defined]
    return [
        (engine.scheduler, "schedule", "scheduling"),
        (engine.scheduler, "update", "taking tokens into account"),
        (engine, "_build_step", "building the step"),
        (runner, "execute", "the runner around all that"),
        (model_runner, "build_model_inputs", "inputs of the network"),
        (runner, "_forward", "network"),
        (model_runner, "sample", "sampling"),
        (engine_loop, "deliver", "text and pieces"),
    ]


def _decode(
    llm: LLM, count: int, prompt_len: int, output_len: int, watch: Stopwatch | None = None, *, profiled: bool = False
) -> tuple[float, int]:
    """Return seconds and number of the decode steps of `count` requests.

    At the first decode step, `watch` is reset and, if `profiled`, the library starts to time its operators.
    """
    pieces = llm.stream(random_prompts(llm, count, prompt_len, count), greedy(output_len))
    for _ in range(2 * count):  # all prompts are computed once each request has two tokens
        next(pieces)
    if watch is not None:
        watch.seconds.clear()
    with library.profiling() if profiled else nullcontext():
        first_step, start = llm.engine.num_steps, time.perf_counter()
        for _ in pieces:
            pass
        return time.perf_counter() - start, llm.engine.num_steps - first_step
