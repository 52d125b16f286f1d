"""Time of a decode step by number of running requests and context length.

    python performance/run.py growth [--model FOLDER | --shape SHAPE] [--out growth] [--gigabytes 2.5] [--rounds 1]

A decode step of a WorkAgent (arrays, network, sampling) is measured for each number of running requests and each
context length. Its lower bound is the time to read every weight and context once, to read and write every fixed-size
state, and to compute every product. The memory bandwidth is the best one measured between these steps, because that of
a virtual machine changes within seconds; the arithmetic peak is the best one measured before and after each round. The
cache holds zeros, which cost as much time as other values.
Combinations whose contexts need more than `--gigabytes` of cache are left out. With several `--rounds`, each
combination counts with the round that came closest to its bound, which removes disturbances by other programs.

Without `--model` the weights are random, of a shape that `run.py make_model` knows (`15m` by default). Writes OUT.md,
OUT.json and, with matplotlib, OUT.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from benchmarks.make_model import SHAPES, make_model
from harness.machine_limits import Limits, LostCoresMeter, MemoryReader, StepCost
from llm_serving.config import load_config
from llm_serving.core.step import STATE_BEFORE, ResultKind, SamplingInput, StateAccess, StepInput
from llm_serving.executor.supervisor import load_settings
from llm_serving.models.spec import ModelSpec
from llm_serving.network.operations import ELEMENT_BYTES
from llm_serving.worker.loading import load_runner
from llm_serving.worker.model_runner import ModelRunner

BLOCK_SIZE: Final = 16
RUNNING: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS: Final = (128, 512, 2048, 8192, 16384)
DTYPE: Final = "bfloat16"


class Point(NamedTuple):
    """Time of a step with this number of requests of one context length."""

    running: int
    context: int
    seconds: float
    """Median of the measured steps."""
    least_s: float
    """Lower bound of the seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            model = Path(folder)
            make_model(
                {**SHAPES[arguments.shape], "max_position_embeddings": max(arguments.contexts) + BLOCK_SIZE}, model
            )
        else:
            model = load_config(None, [], model).model.model_path
        runner = _runner(model, arguments)
    cost, reader = StepCost(runner.spec, DTYPE), MemoryReader()
    limits, meter = Limits.measure(DTYPE), LostCoresMeter()
    measured: dict[tuple[int, int], list[StepTime]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for context in arguments.contexts:
            for running in arguments.running:
                if running * _num_blocks(context) <= runner.kv_tensors.num_blocks:
                    measured[running, context].append(step_time(runner, running, context, arguments.seconds, reader))
        limits = limits.better_of(Limits.measure(DTYPE))
    lost = meter.read()
    points = [closest(size, times, cost, limits) for size, times in measured.items()]
    bandwidths = sorted(each.read_bytes_per_s / 1e9 for times in measured.values() for each in times)
    notes = [
        str(limits),
        f"bandwidth between the steps: {bandwidths[0]:.1f} to {bandwidths[-1]:.1f} GB/s",
        f"cores lost meanwhile: {lost.programs:.2f} to other programs, {lost.host:.2f} to the host",
    ]
    text = "\n".join([*table(points, arguments.contexts), "", *notes])
    print(text)
    arguments.out.with_suffix(".md").write_text(text + "\n")
    document = {"notes": notes, "points": [point._asdict() for point in points]}
    arguments.out.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    plot(points, arguments.out.with_suffix(".svg"))
    return 0


class StepTime(NamedTuple):
    seconds: float
    read_bytes_per_s: float
    """Best memory bandwidth between the steps."""


def step_time(runner: ModelRunner, running: int, context: int, seconds: float, reader: MemoryReader) -> StepTime:
    """Return the median time of a decode step of `running` requests with `context - 1` computed tokens each."""
    times: list[float] = []
    bandwidth = 0.0
    number = runner._next_step
    started = time.perf_counter()
    while len(times) < 7 or time.perf_counter() - started < seconds:
        step = decode_step(number + len(times), running, context, has_states=bool(runner.spec.states))
        if runner._state_guard is not None:
            runner._state_guard._num_tokens[:] = context - 1  # as if the slots held the states of these contexts
        start = time.perf_counter()
        runner.execute(step)
        times.append(time.perf_counter() - start)
        bandwidth = max(bandwidth, reader.bandwidth())
    return StepTime(statistics.median(times[2:]), bandwidth)


def decode_step(number: int, running: int, context: int, *, has_states: bool = False) -> StepInput:
    """Return a decode step in which every request has blocks of its own, and a slot for its state."""
    num_blocks = _num_blocks(context)
    tables = np.arange(running * num_blocks, dtype=np.int32).reshape(running, num_blocks)
    return StepInput(
        step=number,
        token_ids=np.arange(3, 3 + running, dtype=np.int32),
        query_lens=np.ones(running, np.int32),
        num_computed=np.full(running, context - 1, np.int32),
        block_tables=tables,
        block_epochs=np.zeros_like(tables),
        result_tokens=np.array([(row, 0, ResultKind.TOKEN) for row in range(running)], np.int32),
        sampling=SamplingInput.plain(running, position=np.full(running, context, np.int32)),
        states=np.array(
            [StateAccess(row, token, row, 0) for row in range(running * has_states) for token in (STATE_BEFORE, 0)],
            np.int32,
        ).reshape(-1, len(StateAccess._fields)),
    )


def closest(size: tuple[int, int], times: Sequence[StepTime], cost: StepCost, limits: Limits) -> Point:
    """Return the time that is closest to its lower bound. `size`: (running requests, context length)."""
    running, context = size
    num_bytes = cost.num_bytes(running * context) + 2 * running * cost.spec.state_bytes
    flop = cost.flop(running, running, running * context)
    points = []
    for seconds, read_bytes_per_s in times:
        then = replace(limits, read_bytes_per_s=read_bytes_per_s)
        points.append(Point(running, context, seconds, then.seconds(num_bytes, *flop)))
    return max(points, key=lambda point: point.least_s / point.seconds)


def table(points: Sequence[Point], contexts: Sequence[int]) -> list[str]:
    """Return a Markdown table of milliseconds and shares of the limit: running requests by context length."""
    by_size = {(point.running, point.context): point for point in points}
    lines = ["| running | " + " | ".join(f"{context:,} tokens each" for context in contexts) + " |"]
    lines.append("| --- " * (1 + len(contexts)) + "|")
    for running in sorted({point.running for point in points}):
        found = [by_size.get((running, context)) for context in contexts]
        cells = [f"{1e3 * each.seconds:.2f} ms ({each.least_s / each.seconds:.0%})" if each else "-" for each in found]
        lines.append(f"| {running} | " + " | ".join(cells) + " |")
    return lines


def plot(points: Sequence[Point], path: Path) -> None:
    """Plot the step time over running requests and over context length; dashed lines are the limits."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: it wants matplotlib: pip install -e 'llm-serving[bench]'")
        return
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "llm-serving"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(14, 4.6), layout="constrained", sharey=True)
    sides = (("running", "context", "running requests"), ("context", "running", "tokens of context, each"))
    for axis, (along, of, label) in zip(axes, sides, strict=True):
        for color, value in enumerate(sorted({getattr(point, of) for point in points})):
            line = sorted((point for point in points if getattr(point, of) == value), key=lambda each: each[:2])
            values = [getattr(point, along) for point in line]
            name = f"{value:,} {'tokens each' if of == 'context' else 'running'}"
            axis.plot(values, [1e3 * point.seconds for point in line], "o-", color=f"C{color}", ms=3, label=name)
            axis.plot(values, [1e3 * point.least_s for point in line], "--", color=f"C{color}", lw=0.8)
        axis.set(xscale="log", yscale="log", xlabel=label)
        measured = sorted({getattr(point, along) for point in points})
        axis.set_xticks(measured, [f"{each:,}" for each in measured])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes[0].set(ylabel="a step, ms (dashed: limit)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _runner(model: Path, arguments: argparse.Namespace) -> ModelRunner:
    """Return a runner whose cache blocks are all marked as written."""
    longest = min(max(arguments.contexts), ModelSpec.from_folder(model).max_position_embeddings)
    arguments.contexts = [context for context in arguments.contexts if context <= longest]
    most = max(arguments.running)
    per_block = BLOCK_SIZE * ModelSpec.from_folder(model).kv_bytes_per_token(ELEMENT_BYTES[DTYPE])
    num_blocks = min(int(arguments.gigabytes * 1e9 / per_block), most * _num_blocks(longest))
    settings = [
        f"model_config.model_dtype={DTYPE}",
        f"model_config.decode_batch_size={most}",
        f"model_config.max_generate_length={longest}",
        f"pa_config.block_size={BLOCK_SIZE}",
        f"pa_config.num_blocks={num_blocks}",
        *arguments.set,
    ]
    runner, _ = load_runner(load_settings(load_config(None, settings, model), 0), lambda text: None)
    runner._guard._cache.num_written[:] = BLOCK_SIZE
    return runner


def _num_blocks(context: int) -> int:
    return -(-context // BLOCK_SIZE)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="Hugging Face folder, or `demo`")
    parser.add_argument("--shape", choices=SHAPES, default="15m", help="of random weights")
    parser.add_argument("--running", type=_integers, default=list(RUNNING), metavar="1,2,4")
    parser.add_argument("--contexts", type=_integers, default=list(CONTEXTS), metavar="128,512")
    parser.add_argument("--gigabytes", type=float, default=2.5, help="of the cache")
    parser.add_argument("--rounds", type=int, default=1, help="passes over all combinations")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure, seven steps at least")
    parser.add_argument("--out", type=Path, default=Path("growth"))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    return parser.parse_args(argv)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
