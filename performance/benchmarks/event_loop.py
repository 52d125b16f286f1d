"""Longest time for which one request holds the event loop of the server.

    python performance/run.py event_loop

The shipped application receives the most expensive request bodies one by one. *Hold* is the longest time for which no
other request was served, by the wall clock, so it includes time that other programs took. *CPU* is the CPU time of the
event loop's thread in its longest turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.figures import FIRST_PLAIN_TOKEN
from harness.random_work_agent import random_executor
from llm_serving.config import load_config
from llm_serving.core.process import periodic_heap_trim, return_large_blocks
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.replica import build_engine
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.server.app import create_app, tune_interpreter
from llm_serving.server.http.listener import bind
from llm_serving.server.http.server import HttpServer
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from load_test.http_client import HttpClient

MIB = 2**20
NUM_BLOCKS = 8192
PAUSE_S = 0.001
REPEATS = 3


def many(form: str, item: str, count: int) -> str:
    """Return a body whose `@` is replaced by a list of `count` items."""
    return form.replace("@", ",".join([item] * count))


def cases() -> dict[str, tuple[str, str]]:
    """Return name -> path and body of the requests; an empty body is a GET. The first requests fill the timeline."""
    names = "{" + ",".join(f'"{i:x}":0' for i in range(300_000)) + "}"
    some_names = "{" + ",".join(f'"{i:x}":0' for i in range(30_000)) + "}"
    ids = ",".join(["1000"] * 500_000)
    text = "the quick brown fox " * 100
    chat = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, %s}'
    return {
        "nothing": ("/health", ""),
        "128 answers of 256 tokens, 20 log-probabilities each": (
            "/v1/completions",
            json.dumps({"prompt": "x", "n": 128, "max_tokens": 256, "logprobs": 20, "ignore_eos": True}),
        ),
        "the same as a stream": (
            "/v1/completions",
            json.dumps(
                {"prompt": "x", "n": 128, "max_tokens": 256, "logprobs": 20, "ignore_eos": True, "stream": True}
            ),
        ),
        "128 messages of chat, 20 log-probabilities": (
            "/v1/chat/completions",
            json.dumps(
                {"messages": [{"role": "user", "content": "a"}] * 128, "n": 64, "max_tokens": 256, "ignore_eos": True}
                | {"logprobs": True, "top_logprobs": 20}
            ),
        ),
        "512 prompts": ("/v1/completions", json.dumps({"prompt": [text] * 512, "max_tokens": 1})),
        "512 prompts of ids": ("/v1/completions", json.dumps({"prompt": [[1000] * 900] * 512, "max_tokens": 1})),
        "chat_template_kwargs of 300,000 names": ("/v1/chat/completions", chat % f'"chat_template_kwargs": {names}'),
        "chat_template_kwargs of 30,000 names": (
            "/v1/chat/completions",
            chat % f'"chat_template_kwargs": {some_names}',
        ),
        "a million empty prompts": ("/v1/completions", many('{"prompt": [@]}', "[]", 10**6)),
        "30,000 empty prompts": ("/v1/completions", many('{"prompt": [@]}', "[]", 30_000)),
        "two million ids to text": ("/detokenize", many('{"tokens": [@]}', "1", 2_000_000)),
        "500,000 ids to text": ("/detokenize", f'{{"tokens": [{ids}]}}'),
        "a prompt of 500,000 ids": ("/v1/completions", f'{{"prompt": [{ids}]}}'),
        "4 MiB of text to ids": ("/tokenize", '{"prompt": "%s"}' % ("x" * (4 * MIB - 20))),
        "24,000 characters to ids": ("/tokenize", json.dumps({"prompt": text * 12})),
        "4 MiB of escapes": ("/v1/completions", '{"prompt": "%s"}' % ("\\n" * (2 * MIB - 20))),
        "4 MiB of escaped quotes": ("/v1/completions", '{"prompt": "%s"}' % ('\\"' * (2 * MIB - 20))),
        "4,096 messages": ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}] * 4096})),
        "8,000 parts": (
            "/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 8000}]}),
        ),
        "900,000 stop strings": ("/v1/completions", many('{"prompt": "x", "stop": [@]}', '"a"', 900_000)),
        "300,000 biases": ("/v1/completions", f'{{"prompt": "x", "logit_bias": {names}}}'),
        "numbers of 4,000 digits": ("/v1/completions", many('{"prompt": "x", "x": [@]}', "9" * 4000, 1000)),
        "an error behind a million lists": ("/v1/completions", many('{"prompt": [@, {}]}', "[]", 10**6)),
        "2 MiB of white space": ("/generate", '{"inputs": "x"%s}' % (" " * 2 * MIB)),
        "an older route with 300,000 names": ("/models/demo", f'{{"inputs": "x", "x": {names}}}'),
        "the timeline": ("/v1/timeline", ""),
        "the metrics": ("/metrics", ""),
        "the OpenAPI document": ("/openapi.json", ""),
    }


@dataclass
class Watch:
    """The longest turns of an event loop since the last `reset`."""

    hold_s: float = 0.0
    cpu_s: float = 0.0

    def reset(self) -> None:
        self.hold_s = self.cpu_s = 0.0

    async def run(self) -> None:
        while True:
            started, computed = time.perf_counter(), time.thread_time()
            await asyncio.sleep(PAUSE_S)
            self.hold_s = max(self.hold_s, time.perf_counter() - started - PAUSE_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - computed)


async def measure(port: int, watch: Watch) -> None:
    print(f"{'':52} {'hold, ms':>9} {'CPU, ms':>8}  status", flush=True)
    loop = asyncio.get_running_loop()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    sender = multiprocessing.get_context("spawn").Process(target=_send_elsewhere, args=(port, theirs), daemon=True)
    sender.start()
    await loop.run_in_executor(None, ours.recv)
    try:
        for name in cases():
            await asyncio.sleep(0.2)
            watch.reset()
            ours.send(name)
            status = await loop.run_in_executor(None, ours.recv)
            print(f"{name:52} {1000 * watch.hold_s:9.1f} {1000 * watch.cpu_s:8.1f}  {status}", flush=True)
    finally:
        sender.terminate()


def _send_elsewhere(port: int, pipe: multiprocessing.connection.Connection) -> None:
    async def send(path: str, body: str) -> int:
        client = HttpClient("127.0.0.1", port, idle_timeout_s=300.0)
        response = await client.request("POST" if body else "GET", path, body.encode())
        return response.status

    known = cases()
    pipe.send("ready")
    while True:
        path, body = known[pipe.recv()]
        pipe.send([asyncio.run(send(path, body)) for _ in range(REPEATS)][-1])


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    config = load_config(
        None,
        ["pa_config.block_size=16", "model_config.decode_batch_size=512", "serving_config.audit_every=0"],
        Path("demo"),
    )
    assert config.model.model_path is not None
    tokenizer = Tokenizer.load(config.model.model_path)
    metrics = Metrics("demo", config.request_classes)

    @contextmanager
    def open_replica(index: int, publish: Publish, on_progress: Callable[[str], None]) -> Iterator[Engine]:
        executor, _ = random_executor(config, FIRST_PLAIN_TOKEN, tokenizer.vocab_size)
        yield build_engine(config, NUM_BLOCKS, executor, tokenizer, metrics, publish, index)

    engine = AsyncEngine(config, ModelSpec.from_folder(config.model.model_path), tokenizer, metrics, open_replica)
    return_large_blocks()
    tune_interpreter()
    with bind("127.0.0.1", 0) as listener, periodic_heap_trim():
        server = HttpServer(create_app(engine), listener, config.serving)
        port = listener.getsockname()[1]

        @asynccontextmanager
        async def running() -> AsyncIterator[None]:
            engine.start()
            watch = Watch()
            watching = asyncio.create_task(watch.run())

            async def work() -> None:
                try:
                    await measure(port, watch)
                finally:
                    server.should_exit = True

            measuring = asyncio.create_task(work())
            try:
                yield
            finally:
                await measuring
                watching.cancel()
                await engine.stop()

        server.run_within(running())
    return 0
