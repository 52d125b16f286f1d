"""What watching costs: the processor time of the master while many requests run, with and without streams of /v1/live.

    bash scripts/start.sh
    .venv/bin/python performance/live_cost.py --url http://127.0.0.1:8835 --running 128 --viewers 1

Requests that decode are kept running; spans without and with viewers take turns, so that what the machine does besides
weighs on both alike. The processor time is the master's own, as its /metrics tells. The key of a server that wants one
is read from the environment variable LLM_SERVING_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple
from urllib.parse import urlsplit


class Totals(NamedTuple):
    time_s: float
    cpu_s: float
    steps: float
    tokens: float
    running: float


class Span(NamedTuple):
    """What happened between two readings, a second."""

    cpu: float
    """Seconds of processor time: 0.01 is one per cent of a core."""
    steps: float
    tokens: float
    running: float


class Server:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        key = os.environ.get("LLM_SERVING_API_KEY")
        self._head = f"Host: {self._host}\r\nConnection: close\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
        """The answer from its body on; the connection ends with it, or with the context."""
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**22)
        try:
            about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
            writer.write(f"{method} {path} HTTP/1.1\r\n{self._head}{about}\r\n".encode() + body)
            head = await reader.readuntil(b"\r\n\r\n")
            if (status := int(head.split(b" ", 2)[1])) != 200:
                raise SystemExit(f"{path}: status {status}: {(await reader.read(500)).decode(errors='replace')}")
            yield reader
        finally:
            writer.close()

    async def totals(self) -> Totals:
        async with self.open("GET", "/metrics") as reader:
            text = (await reader.read()).decode()

        def value(name: str) -> float:
            found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            if found is None:
                raise SystemExit(f"/metrics has no {name}")
            return float(found[1])

        return Totals(
            time.perf_counter(),
            value("process_cpu_seconds_total"),
            value("llm_serving:steps_total"),
            value("vllm:generation_tokens_total"),
            value("vllm:num_requests_running"),
        )

    async def decode(self, max_tokens: int) -> None:
        """Has one request after the other decoded."""
        prompt = {"prompt": "Count from 1 to 60.", "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
        body = json.dumps(prompt).encode()
        while True:
            async with self.open("POST", "/v1/completions", body) as reader:
                await reader.read()

    async def watch(self, seen: list[int]) -> None:
        """Adds the length of each piece of the stream."""
        async with self.open("GET", "/v1/live") as reader:
            while piece := await reader.read(2**16):
                seen.append(piece.count(b"event: picture"))


async def span(server: Server, seconds: float) -> Span:
    before = await server.totals()
    await asyncio.sleep(seconds)
    after = await server.totals()
    elapsed = after.time_s - before.time_s
    return Span(
        (after.cpu_s - before.cpu_s) / elapsed,
        (after.steps - before.steps) / elapsed,
        (after.tokens - before.tokens) / elapsed,
        (before.running + after.running) / 2,
    )


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


async def measure(url: str, running: int, viewers: int, seconds: float, rounds: int, max_tokens: int) -> None:
    server = Server(url)
    requests = [asyncio.create_task(server.decode(max_tokens)) for _ in range(running)]
    try:
        await span(server, seconds)  # until all run
        without: list[Span] = []
        watched: list[Span] = []
        num_pictures = 0
        for _ in range(rounds):
            without.append(await span(server, seconds))
            seen: list[int] = []
            watching = [asyncio.create_task(server.watch(seen)) for _ in range(viewers)]
            watched.append(await span(server, seconds))
            await ended(watching)
            num_pictures += sum(seen)
    finally:
        await ended(requests)
    sys.stdout.write(
        "| viewers | running | master, % of a core | steps/s | output tok/s |\n| --- | --- | --- | --- | --- |\n"
    )
    for name, spans in (("0", without), (str(viewers), watched)):
        cpu, steps, tokens, run = (statistics.mean(each) for each in zip(*spans, strict=True))
        sys.stdout.write(f"| {name} | {run:.0f} | {100 * cpu:.2f} | {steps:.1f} | {tokens:.0f} |\n")
    differences = [100 * (on.cpu - off.cpu) for off, on in zip(without, watched, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    mean = statistics.mean(differences)
    pictures = num_pictures / (rounds * seconds * max(1, viewers))
    sys.stdout.write(
        f"watching costs {mean:.2f} % of a core (standard error {error:.2f}); {pictures:.1f} pictures/s each\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8835")
    parser.add_argument("--running", type=int, default=128, help="requests that decode (default: 128)")
    parser.add_argument("--viewers", type=int, default=1, help="streams of /v1/live (default: 1)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a span (default: 10)")
    parser.add_argument("--rounds", type=int, default=6, help="spans of each kind (default: 6)")
    parser.add_argument("--max-tokens", type=int, default=400, help="of each request (default: 400)")
    arguments = parser.parse_args()
    asyncio.run(
        measure(
            arguments.url,
            arguments.running,
            arguments.viewers,
            arguments.seconds,
            arguments.rounds,
            arguments.max_tokens,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
