"""Speed of the engine without a server: python performance/engine_benchmark.py --model FOLDER [--tests A,B,C]

    A   one stream: prompt 128, output 128; time to the first token, then tokens per second (median of runs)
    B   32 and 128 requests at once: prompt 128, output 128; output tokens per second, prefill included
    C   one prompt of 1,024, one output token: prompt tokens per second (median of runs)
    S   where a decode step's time goes, for one stream and for each size of test B: microseconds for each operator, and
        what is left of the step: the graph around the kernels, sampling, scheduling

Prompts are random token ids, answers greedy, the end of sequence is ignored. Beside each figure stands its share of
what the memory allows, from the bandwidth measured in the same run. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from llm_serving.config import load_config
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.kernels import library
from llm_serving.offline import LLM

PROMPT_LEN = OUTPUT_LEN = 128
LONG_PROMPT_LEN = 1024
BYTES_READ_FOR_BANDWIDTH = 1 << 30
FIRST_PLAIN_TOKEN = 259


@dataclass(frozen=True)
class Figure:
    test: str
    quantity: str
    value: float
    unit: str
    limit: float | None = None
    """What the bandwidth allows, in the same unit."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    overrides = [
        f"model_config.model_dtype={arguments.dtype}",
        f"pa_config.num_blocks={arguments.num_blocks}",
        f"model_config.decode_batch_size={max(arguments.batch)}",
        *arguments.set,
    ]
    llm = LLM(load_config(None, overrides, arguments.model))
    bandwidth = read_bandwidth()
    figures = [Figure("-", "read bandwidth", bandwidth / 1e9, "GB/s")]
    parameters_read = llm.model_spec.num_parameters
    if not llm.model_spec.tie_word_embeddings:  # then one row of the table is read, not all of it
        parameters_read -= llm.model_spec.vocab_size * llm.model_spec.hidden_size
    weights = parameters_read * (4 if arguments.dtype == "float32" else 2)
    _warm_up(llm)
    if "A" in arguments.tests:
        figures += single_stream(llm, arguments.runs, bandwidth / weights)
    if "B" in arguments.tests:
        figures += [batch(llm, count) for count in arguments.batch]
    if "C" in arguments.tests:
        figures.append(prefill(llm, arguments.runs))
    if "S" in arguments.tests:
        for count in (1, *arguments.batch):
            figures += step_breakdown(llm, count)
    for figure in figures:
        share = f"  {100 * figure.value / figure.limit:.0f} % of {figure.limit:,.1f}" if figure.limit else ""
        print(f"{figure.test:3} {figure.quantity:28} {figure.value:10,.1f} {figure.unit}{share}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=2) + "\n")
    return 0


def single_stream(llm: LLM, runs: int, limit: float) -> list[Figure]:
    """Test A. `limit`: tokens per second if every step only read the weights once."""
    first, rates = [], []
    for run in range(runs):
        start = time.perf_counter()
        times = [time.perf_counter() for _ in llm.stream(_prompts(llm, 1, PROMPT_LEN, run), _greedy(OUTPUT_LEN))]
        first.append(times[0] - start)
        rates.append((OUTPUT_LEN - 1) / (times[-1] - times[0]))
    return [
        Figure("A", "time to first token", 1e3 * statistics.median(first), "ms"),
        Figure("A", "decode, one stream", statistics.median(rates), "tok/s", limit),
    ]


def batch(llm: LLM, count: int) -> Figure:
    """Test B."""
    start = time.perf_counter()
    outputs = llm.generate(_prompts(llm, count, PROMPT_LEN, count), _greedy(OUTPUT_LEN))
    elapsed = time.perf_counter() - start
    return Figure(f"B{count}", "output", sum(len(output.token_ids) for output in outputs) / elapsed, "tok/s")


def prefill(llm: LLM, runs: int) -> Figure:
    """Test C."""
    rates = []
    for run in range(runs):
        start = time.perf_counter()
        llm.generate(_prompts(llm, 1, LONG_PROMPT_LEN, run), _greedy(1))
        rates.append(LONG_PROMPT_LEN / (time.perf_counter() - start))
    return Figure("C", "prefill", statistics.median(rates), "tok/s")


def step_breakdown(llm: LLM, count: int) -> list[Figure]:
    """Test S: the mean decode step of `count` requests, microseconds."""
    pieces = llm.stream(_prompts(llm, count, PROMPT_LEN, count), _greedy(OUTPUT_LEN))
    for _ in range(2 * count):  # every prompt is in the cache when each has two tokens
        next(pieces)
    first_step = llm.engine.num_steps
    with library.profiling():
        start = time.perf_counter()
        for _ in pieces:
            pass
        elapsed = time.perf_counter() - start
    num_steps = llm.engine.num_steps - first_step
    times = [time for time in library.operator_times() if time.calls]
    kernels = sum(time.seconds for time in times)
    rows = [(time.name, time.seconds) for time in times] + [("everything but kernels", elapsed - kernels)]
    return [Figure(f"S{count}", name, 1e6 * seconds / num_steps, "us/step") for name, seconds in rows]


def read_bandwidth() -> float:
    """Bytes per second at which the kernels' threads read memory that is in no cache, best of five."""
    memory = np.ones(BYTES_READ_FOR_BANDWIDTH // 8, np.int64)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        library.load().llm_read_memory(memory.ctypes.data, memory.nbytes)
        best = max(best, memory.nbytes / (time.perf_counter() - start))
    return best


def _warm_up(llm: LLM) -> None:
    llm.generate(_prompts(llm, 2, 16, 99), _greedy(4))


def _prompts(llm: LLM, count: int, length: int, seed: int) -> list[str | list[int]]:
    rng = np.random.default_rng([seed, count, length])
    low = min(FIRST_PLAIN_TOKEN, llm.model_spec.vocab_size // 2)
    return list(rng.integers(low, llm.model_spec.vocab_size, (count, length)).tolist())


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="Hugging Face folder, or `demo`")
    parser.add_argument("--tests", type=lambda text: text.split(","), default=["A", "B", "C"], metavar="A,B,C")
    parser.add_argument("--batch", type=_integers, default=[32, 128], metavar="32,128", help="sizes of test B")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--num-blocks", type=int, default=2304, help="blocks of 16 tokens in the cache")
    parser.add_argument("--runs", type=int, default=3, help="runs of tests A and C, of which the median counts")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
