"""Where the time of a decode step goes: operators, the graph around them, Python on both sides, and the way between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from figures import Figure, greedy, random_prompts
from llm_serving.engine import engine as engine_loop
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.kernels import library
from llm_serving.offline import LLM
from llm_serving.worker import model_runner
from load_benchmark import started
from stopwatch import Stopwatch

SAMPLING_OPERATOR = "sample"


def step_breakdown(llm: LLM, counts: Sequence[int], prompt_len: int, output_len: int) -> list[Figure]:
    """Test S: the mean decode step for each number of requests, microseconds; then the same behind a WorkAgent."""
    figures, local_step = [], {}
    for count in counts:
        watch = Stopwatch()
        with watch.on(*_places(llm.engine)):
            total, num_steps = _decode(llm, count, prompt_len, output_len, watch, profiled=True)
        operators = {each.name: each.seconds for each in library.operator_times() if each.calls}
        operators.pop(SAMPLING_OPERATOR, None)  # Python calls it, not the graph: it is in the time of sampling
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
    """The same steps through socket and shared memory: one at a time, and one ahead of the WorkAgent."""
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


def _places(engine: engine_loop.Engine) -> list[tuple[Any, str, str]]:
    """The parts of a step that are told apart, where they are called from."""
    runner = engine._executor._runner  # type: ignore[attr-defined]
    return [
        (engine.scheduler, "schedule", "scheduling"),
        (engine.scheduler, "update", "taking tokens into account"),
        (engine, "build_step", "building the step"),
        (runner, "execute", "the runner around all that"),
        (model_runner, "build_model_inputs", "inputs of the network"),
        (runner, "_forward", "network"),
        (model_runner, "sample", "sampling"),
        (engine_loop, "deliver", "text and pieces"),
    ]


def _decode(
    llm: LLM, count: int, prompt_len: int, output_len: int, watch: Stopwatch | None = None, *, profiled: bool = False
) -> tuple[float, int]:
    """Seconds and number of the decode steps of `count` requests.

    From the first of them on `watch` counts from zero and, if `profiled`, the library the time of its operators.
    """
    pieces = llm.stream(random_prompts(llm, count, prompt_len, count), greedy(output_len))
    for _ in range(2 * count):  # every prompt is in the cache when each has two tokens
        next(pieces)
    if watch is not None:
        watch.seconds.clear()
    with library.profiling() if profiled else nullcontext():
        first_step, start = llm.engine.num_steps, time.perf_counter()
        for _ in pieces:
            pass
        return time.perf_counter() - start, llm.engine.num_steps - first_step
