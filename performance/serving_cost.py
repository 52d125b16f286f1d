"""CPU time of the serving process for each token that it streams over HTTP, and for each short request."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from figures import FIRST_PLAIN_TOKEN
from http_client import HttpClient
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine, Publish
from llm_serving.engine.replica import build_engine
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.server.app import create_app
from llm_serving.server.http_server import HttpServer
from llm_serving.server.listener import bind
from llm_serving.server.middleware.access_log import open_access_log
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from random_agent import random_executor

PROMPT_LEN, OUTPUT_LEN = 64, 256
REPEATS = 16
"""Of short requests, `num_streams` each time."""
STEP_S = 0.01
"""Of a step of the model, asleep: time for the server to send what the step before has brought."""


def cpu_seconds_per_token(config: ServingConfig, num_blocks: int, num_streams: int) -> float:
    """Seconds of CPU time, all threads of this process, while another one reads `num_streams` streams at once."""
    return _cpu_seconds(config, num_blocks, num_streams, OUTPUT_LEN, 1) / (num_streams * OUTPUT_LEN)


def cpu_seconds_per_request(config: ServingConfig, num_blocks: int, num_streams: int) -> float:
    """The same for a request whose answer is one token, with the access log that the configuration has."""
    return _cpu_seconds(config, num_blocks, num_streams, 1, REPEATS) / (num_streams * REPEATS)


def _cpu_seconds(config: ServingConfig, num_blocks: int, num_streams: int, output_len: int, repeats: int) -> float:
    assert config.model.model_path is not None
    tokenizer = Tokenizer.load(config.model.model_path)
    metrics = Metrics("demo", config.request_classes)

    @contextmanager
    def open_replica(index: int, publish: Publish, on_progress: Callable[[str], None]) -> Iterator[Engine]:
        executor, _ = random_executor(config, FIRST_PLAIN_TOKEN, tokenizer.vocab_size, STEP_S)
        yield build_engine(config, num_blocks, executor, tokenizer, metrics, publish, index)

    engine = AsyncEngine(config, ModelSpec.from_folder(config.model.model_path), tokenizer, metrics, open_replica)
    seconds: list[float] = []
    access_log, close_log = open_access_log(config.serving)
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(create_app(engine, access_log), listener, engine.config.serving)
        port = listener.getsockname()[1]

        async def measure() -> None:
            try:
                for _ in range(2):  # the first time warms up
                    start = time.process_time()
                    await asyncio.to_thread(_read_elsewhere, port, num_streams, output_len, repeats)
                    seconds.append(time.process_time() - start)
            finally:
                server.should_exit = True

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            engine.start()
            task = asyncio.create_task(measure())
            try:
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
        raise RuntimeError("the reader of the streams failed; its error stands above")


def _read_streams(port: int, num_streams: int, output_len: int, repeats: int) -> None:
    async def read(index: int) -> None:
        prompt = [FIRST_PLAIN_TOKEN + (index + place) % 64 for place in range(PROMPT_LEN)]
        body = {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "stream": True, "seed": index}
        client = HttpClient("127.0.0.1", port, idle_timeout_s=60.0)
        response = await client.request("POST", "/v1/completions", json.dumps(body).encode())
        if response.status != 200 or not response.body.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{response.status}: {response.body[-300:]!r}")

    async def read_all() -> None:
        for _ in range(repeats):
            await asyncio.gather(*(read(index) for index in range(num_streams)))

    asyncio.run(read_all())
