"""CPU time of the master for a step, a streamed token and a short request, without a model.

    python performance/run.py scheduler [--tests P,H] [--policy mixed]

    P   microseconds per step of each part of the engine loop, while many requests decode, requests of several classes
        and tenants wait, and finished requests are replaced. The median is a step that only decodes; the mean includes
        admissions and finished requests
    H   microseconds of CPU time of the serving process, without the replaced WorkAgent, for each token streamed over
        HTTP (another process reads as many streams as run at once; submitting them is included), and for each request
        of one token, whose prompt is a text. Median CPU time of each part of such a request, from its complete body
        until it is scheduled: `time.thread_time` is read at calls on the event loop and in the engines' threads, and
        the time to schedule a step is divided among the requests that start in it. "The rest" is everything before
        the body is complete and after the request is scheduled. Tokens per second of all replicas together: with 16
        replicas, as many as one master can stream; the start of the reader counts. Add `--set
        serving_config.access_log=FILE` for the cost of the access log, `--set cluster_config.replicas=N` for N replicas
        with that many streams each, `--set scheduler_config.record_path=FOLDER` for the cost of recording

Engine, scheduler, server, frames and tokenizer are the shipped ones. The WorkAgent is replaced by one that chooses
tokens at random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from harness.figures import FIRST_PLAIN_TOKEN, Figure, Stopwatch
from harness.random_work_agent import RandomAgent, random_executor
from llm_serving.config import load_config
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine import engine as engine_loop
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.replica import build_engine
from llm_serving.engine.request_stream import RequestStream
from llm_serving.executor.executor import RemoteExecutor
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.recording.recorder import RecordedScheduler
from llm_serving.scheduler import Schedule
from llm_serving.server.app import create_app, tune_interpreter
from llm_serving.server.generation import pipeline
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from llm_serving.server.middleware.access_log import open_access_log
from llm_serving.server.parsing import body as body_reader
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from load_test.http_client import HttpClient

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
            "serving_config.audit_every=0",  # an audit would find that random tokens differ
            "serving_config.max_connections=16384",
            "serving_config.max_connections_per_address=16384",  # the reader of all streams has one address
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
        num_tokens = num_streams * OUTPUT_LEN
        cpu_s, seconds = _seconds(config, num_blocks, num_streams, OUTPUT_LEN, 1, StartTimes())
        figures.append(Figure("H", "serving process, CPU time", 1e6 * cpu_s / num_tokens, "us/token"))
        figures.append(Figure("H", "streamed by all replicas together", num_tokens / seconds, "tok/s"))
        figures += request_parts(config, num_blocks, num_streams)
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
    """Run test P."""
    load = _Load(config, num_blocks, num_waiting)
    engine, agent = load.engine, load.agent
    for _ in range(config.model.decode_batch_size + 64):
        load.step()
    watch = Stopwatch()
    parts: dict[str, list[float]] = defaultdict(list)
    with watch.on(*_timed_functions(engine, agent)):
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
        table["event log and recorder"] = _sums(parts, "event log", RECORDER)
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
    """An engine with all slots occupied and a constant number of waiting requests."""

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
        """Requests to submit before the next step, in place of finished ones."""

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


def _timed_functions(engine: Engine, agent: RandomAgent) -> list[tuple[Any, str, str]]:
    """Return (owner, attribute, name) of the timed parts of the loop."""
    executor = engine.executor
    assert isinstance(executor, RemoteExecutor)
    recorder = engine.scheduler._recorder if isinstance(engine.scheduler, RecordedScheduler) else None
    recorded = [] if recorder is None else [(recorder, name, RECORDER) for name in ("event", "decision")]
    return [
        *recorded,
        (engine, "step", "the rest of the loop"),
        (engine.scheduler, "schedule", "scheduling"),
        (engine.scheduler, "update", "taking tokens into account"),
        (engine, "_build_step", "building the step"),
        (executor, "submit", "writing it for the WorkAgent"),
        (executor, "collect", "reading the reply"),
        (agent, "receive", AGENT),
        (engine_loop, "deliver", "text and pieces"),
        *(
            (engine.event_log, event, "event log")
            for event in ("on_scheduled", "on_submitted", "on_completed", "ended")
        ),
        (engine._step_metrics, "on_completed", "metrics of the step"),
        (engine._reports, "on_completed", "estimate of the load"),
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


PROMPT_LEN, OUTPUT_LEN = 64, 256
TEXT = "Once upon a time, a small bird lived in a tall tree. Every morning, it sang a song to its friends in the wood."
"""Prompt of requests of one token. The index of the stream precedes it."""
REPEATS = 16
"""Rounds of short requests, `num_streams` in each."""
STEP_S = 0.01
"""Seconds that a step sleeps, in which the server sends the tokens of the previous step."""


class StartTimes:
    """Measures the CPU time of each part of the start of a request. `parts`: name of a part -> seconds per request."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)
        self._marks: dict[asyncio.Task[Any] | None, float] = {}

    @contextmanager
    def on_event_loop(self, engine: AsyncEngine) -> Iterator[None]:
        read_body, start, generate = body_reader.read_body, pipeline.start_generation, engine.generate

        async def timed_read(*arguments: Any) -> bytes:
            body = await read_body(*arguments)
            self._marks[asyncio.current_task()] = time.thread_time()
            return body

        async def timed_start(request: pipeline.ProtocolRequest) -> pipeline.StartedGeneration:
            self._record("decoding and checking the body")
            return await start(request)

        def timed_generate(*arguments: Any, **named: Any) -> RequestStream:
            stream = generate(*arguments, **named)
            self._record("tokenizing and admission")
            del self._marks[asyncio.current_task()]
            return stream

        with (
            patch.object(body_reader, "read_body", timed_read),
            patch.object(pipeline, "start_generation", timed_start),
            patch.object(engine, "generate", timed_generate),
        ):
            yield

    def _record(self, part: str) -> None:
        """Record the CPU time of the event loop since this task's last mark. The task is not suspended in between."""
        task, now = asyncio.current_task(), time.thread_time()
        self.parts[part].append(now - self._marks[task])
        self._marks[task] = now

    def in_engine(self, engine: Engine) -> None:
        add, schedule = engine._add, engine._schedule

        def timed_add(request: Request) -> None:
            began = time.thread_time()
            add(request)
            self.parts["adding to the scheduler's queue"].append(time.thread_time() - began)

        def timed_schedule(now: float) -> Schedule | None:
            began = time.thread_time()
            step = schedule(now)
            if step is not None and (num_started := len(step.started)):
                self.parts["scheduling"] += [(time.thread_time() - began) / num_started] * num_started
            return step

        engine._add, engine._schedule = timed_add, timed_schedule  # type: ignore[method-assign]


def request_parts(config: ServingConfig, num_blocks: int, num_streams: int, repeats: int = REPEATS) -> list[Figure]:
    """Return the CPU time of a request of one token and of its parts, with the configured access log."""
    times = StartTimes()
    num_requests = num_streams * repeats
    whole = _seconds(config, num_blocks, num_streams, 1, repeats, times)[0] / num_requests
    assert {len(seconds) for seconds in times.parts.values()} == {num_requests}
    medians = {name: statistics.median(seconds) for name, seconds in times.parts.items()}
    medians["from the complete body to the schedule"] = until = sum(medians.values())
    medians |= {"the rest": whole - until, "the whole": whole}
    return [Figure("H", f"request of one token: {name}", 1e6 * each, "us/request") for name, each in medians.items()]


def _seconds(
    config: ServingConfig, num_blocks: int, num_streams: int, output_len: int, repeats: int, times: StartTimes
) -> tuple[float, float]:
    """Return CPU seconds and elapsed seconds of this process, while another process reads `num_streams` streams. The
    CPU time of the WorkAgents' replacements does not count.
    """
    assert config.model.model_path is not None
    tokenizer = Tokenizer.load(config.model.model_path)
    metrics = Metrics("demo", config.request_classes)
    agents: list[RandomAgent] = []

    def cpu_s() -> float:
        return time.process_time() - sum(agent.cpu_s for agent in agents)

    @contextmanager
    def open_replica(index: int, publish: Publish, on_progress: Callable[[str], None]) -> Iterator[Engine]:
        executor, agent = random_executor(config, FIRST_PLAIN_TOKEN, tokenizer.vocab_size, STEP_S)
        agents.append(agent)
        built = build_engine(config, num_blocks, executor, tokenizer, metrics, publish, index)
        times.in_engine(built)
        yield built

    engine = AsyncEngine(config, ModelSpec.from_folder(config.model.model_path), tokenizer, metrics, open_replica)
    seconds: list[tuple[float, float]] = []
    tune_interpreter()
    access_log, close_log = open_access_log(config.serving)
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(create_app(engine, access_log), listener, engine.config.serving)
        port = listener.getsockname()[1]

        async def measure() -> None:
            try:
                for _ in range(2):  # the first run is a warm-up
                    times.parts.clear()
                    start, began = cpu_s(), time.perf_counter()
                    await asyncio.to_thread(_read_elsewhere, port, num_streams, output_len, repeats)
                    seconds.append((cpu_s() - start, time.perf_counter() - began))
            finally:
                server.should_exit = True

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            engine.start()
            task = asyncio.create_task(measure())
            try:
                with times.on_event_loop(engine):
                    yield
            finally:
                await engine.stop()
                await task

        server.run_within(running())
    close_log()
    return seconds[-1]


def _read_elsewhere(*arguments: int) -> None:
    reader = multiprocessing.get_context("spawn").Process(target=_read_streams, args=arguments)
    reader.start()
    reader.join()
    if reader.exitcode != 0:
        raise RuntimeError("the reader of the streams failed; its error is above")


def _read_streams(port: int, num_streams: int, output_len: int, repeats: int) -> None:
    async def read(index: int) -> None:
        prompt: str | list[int] = f"{index}: {TEXT}"
        if output_len > 1:
            prompt = [FIRST_PLAIN_TOKEN + (index + position) % 64 for position in range(PROMPT_LEN)]
        body = {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "stream": True, "seed": index}
        client = HttpClient("127.0.0.1", port, idle_timeout_s=600.0)
        response = await client.request("POST", "/v1/completions", json.dumps(body).encode())
        if response.status != 200 or not response.body.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{response.status}: {response.body[-300:]!r}")

    async def read_all() -> None:
        for _ in range(repeats):
            await asyncio.gather(*(read(index) for index in range(num_streams)))

    asyncio.run(read_all())
