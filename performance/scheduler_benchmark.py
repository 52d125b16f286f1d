"""What a step costs the master, whatever the model costs: python performance/scheduler_benchmark.py [--policy mixed]

    P   each part of the engine loop, microseconds a step: many requests decode, more of several classes and tenants
        wait, and those that end are replaced. The median is a step that only decodes, the mean has admissions and ends
    H   everything of the serving process over HTTP, microseconds of CPU time for each generated token: as many streams
        as run at once, read by another process; submitting them is included; and for each request of one token, with
        `--set serving_config.access_log=FILE` what its line in the log costs too; with
        `--set cluster_config.replicas=N` the same of N replicas, each of which runs so many

The engine, the scheduler, the server and the frames are the shipping ones, with the shipped tokenizer; the WorkAgent is
replaced by one that chooses tokens at random. What the flight recorder costs besides is told with
`--set scheduler_config.record_path=FOLDER`. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from figures import FIRST_PLAIN_TOKEN, Figure
from llm_serving.config import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine import engine as engine_loop
from llm_serving.engine.engine import Engine
from llm_serving.engine.replica import build_engine
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.observability.metrics import Metrics
from llm_serving.recording.recorder import RecordedScheduler
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from random_agent import RandomAgent, random_executor
from serving_cost import cpu_seconds_per_request, cpu_seconds_per_token
from stopwatch import Stopwatch

PROMPT_LENS, OUTPUT_LENS = (16, 256), (256, 1024)
NUM_TENANTS = 8
PRIORITIES = (-1, 0, 1)
AGENT, RECORDER = "the WorkAgent", "recorder"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    longest = PROMPT_LENS[1] + OUTPUT_LENS[1]
    config = load_config(
        None,
        [
            f"model_config.decode_batch_size={arguments.running}",
            f"model_config.max_generate_length={longest}",
            f"scheduler_config.policy={arguments.policy}",
            "serving_config.audit_every=0",  # nothing chosen at random is chosen again
            *arguments.set,
        ],
        Path("demo"),
    )
    num_blocks = arguments.running * -(-longest // config.pa.block_size) + 64
    figures: list[Figure] = []
    if "P" in arguments.tests:
        figures += step_parts(config, num_blocks, arguments.waiting, arguments.steps)
    if "H" in arguments.tests:
        num_streams = arguments.running * config.num_replicas
        seconds = cpu_seconds_per_token(config, num_blocks, num_streams)
        figures.append(Figure("H", "serving process, CPU time", 1e6 * seconds, "us/token"))
        seconds = cpu_seconds_per_request(config, num_blocks, num_streams)
        figures.append(Figure("H", "serving process, CPU time of a request of one token", 1e6 * seconds, "us/request"))
    for figure in figures:
        print(figure, flush=True)
    if arguments.json is not None:
        rows = [
            {"test": each.test, "quantity": each.quantity, "value": each.value, "unit": each.unit} for each in figures
        ]
        settings = {name: str(value) for name, value in vars(arguments).items()}
        arguments.json.write_text(json.dumps({"settings": settings, "figures": rows}, indent=2) + "\n")
    return 0


def step_parts(config: ServingConfig, num_blocks: int, num_waiting: int, num_steps: int) -> list[Figure]:
    """Test P."""
    load = _Load(config, num_blocks, num_waiting)
    engine, agent = load.engine, load.agent
    for _ in range(config.model.decode_batch_size + 64):
        load.step()
    watch = Stopwatch()
    parts: dict[str, list[float]] = defaultdict(list)
    with watch.on(*_places(engine, agent)):
        for _ in range(num_steps):
            watch.seconds.clear()
            load.step()
            for name, seconds in watch.seconds.items():
                parts[name].append(seconds)
    assert len(engine.scheduler.running) + load.num_ended == config.model.decode_batch_size, "slots are empty"
    parts.pop(AGENT)
    names = [name for name in parts if name != "the rest of the loop"] + ["the rest of the loop"]
    table = {name: parts[name] for name in names}
    table["scheduling and taking tokens into account"] = _sums(parts, "scheduling", "taking tokens into account")
    if RECORDER in parts:
        table["journal and recorder"] = _sums(parts, "journal", RECORDER)
    table["whole step"] = _sums(parts, *names)
    return [
        figure
        for name, values in table.items()
        for figure in (
            Figure("P", f"{name}, median", 1e6 * statistics.median(values), "us/step"),
            Figure("P", f"{name}, mean", 1e6 * statistics.mean(values), "us/step"),
        )
    ]


class _Load:
    """An engine with all its slots taken and always as many requests waiting."""

    def __init__(self, config: ServingConfig, num_blocks: int, num_waiting: int) -> None:
        assert config.model.model_path is not None
        tokenizer = Tokenizer.load(config.model.model_path)
        executor, self.agent = random_executor(config, FIRST_PLAIN_TOKEN, tokenizer.vocab_size)
        metrics = Metrics("demo", config.request_classes)
        self.engine: Engine = build_engine(config, num_blocks, executor, tokenizer, metrics, self._publish)
        self._rng = np.random.default_rng(0)
        self._vocab_size = tokenizer.vocab_size
        self._ids = count()
        self.num_ended = config.model.decode_batch_size + num_waiting
        """Requests that the next step brings in place of those that ended in this one."""

    def step(self) -> None:
        for _ in range(self.num_ended):
            self.engine.submit(self._request())
        self.num_ended = 0
        self.engine.step()

    def _publish(self, pieces: list[RequestOutput]) -> None:
        self.num_ended += sum(piece.finished for piece in pieces)

    def _request(self) -> Request:
        number, rng = next(self._ids), self._rng
        prompt = rng.integers(FIRST_PLAIN_TOKEN, self._vocab_size, rng.integers(*PROMPT_LENS)).tolist()
        output_len = int(rng.integers(*OUTPUT_LENS))
        return Request(
            f"request-{number}",
            prompt,
            SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.7, seed=number),
            priority=int(rng.choice(PRIORITIES)),
            tenant=f"tenant-{rng.integers(NUM_TENANTS)}",
            arrival_time=float(number),
        )


def _places(engine: Engine, agent: RandomAgent) -> list[tuple[Any, str, str]]:
    """The parts that are told apart, where the loop calls them."""
    executor = engine._executor
    assert isinstance(executor, RemoteExecutor)
    recorder = engine.scheduler._recorder if isinstance(engine.scheduler, RecordedScheduler) else None
    recorded = [] if recorder is None else [(recorder, name, RECORDER) for name in ("event", "decision")]
    return [
        *recorded,
        (engine, "step", "the rest of the loop"),
        (engine.scheduler, "schedule", "scheduling"),
        (engine.scheduler, "update", "taking tokens into account"),
        (engine, "build_step", "building the step"),
        (executor, "submit", "writing it for the WorkAgent"),
        (executor, "collect", "reading the reply"),
        (agent, "receive", AGENT),
        (engine_loop, "deliver", "text and pieces"),
        *((engine.journal, event, "journal") for event in ("decided", "formed", "replied", "ended")),
        (engine, "_record", "metrics of the step"),
        (engine._reports, "replied", "estimate of the load"),
    ]


def _sums(parts: dict[str, list[float]], *names: str) -> list[float]:
    return [sum(seconds) for seconds in zip(*(parts[name] for name in names), strict=False)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=lambda text: text.split(","), default=["P", "H"], metavar="P,H")
    parser.add_argument("--policy", default="mixed")
    parser.add_argument("--running", type=int, default=128, help="requests that decode")
    parser.add_argument("--waiting", type=int, default=2000, help="requests that wait, in test P")
    parser.add_argument("--steps", type=int, default=1000, help="measured in test P")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
