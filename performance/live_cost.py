"""What watching costs: the processor time of the master while many requests run, with and without streams of /v1/live.

    bash scripts/start.sh
    .venv/bin/python performance/live_cost.py --url http://127.0.0.1:8835 --running 128 --viewers 1

Requests that decode are kept running; short spans without and with viewers take turns, in changing order. The
processor time is that of all threads of the master, which must run on this machine, in nanoseconds as Linux tells it
(/proc/PID/task/*/schedstat): what other processes do is not in it. What a span computes differs, so the cost is the
part of the difference within a pair that steps and tokens do not explain (least squares over all pairs). Pairs are
added until the 95 % interval of the cost lies on one side of `--limit`, at most for `--minutes`. The key of a server
that wants one is read from the environment variable LLM_SERVING_API_KEY.

Exit code: 0 below the limit, 1 above it, 2 not decided.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

LEAST_PAIRS: Final = 12
"""Before which nothing is decided."""
SETTLE_S: Final = 0.3
"""Between the first or last picture of a stream and the span beside it."""


class Totals(NamedTuple):
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
    pictures: float


class Cost(NamedTuple):
    """Seconds of processor time a second, for which steps and tokens do not account."""

    mean: float
    half_width: float
    """Of the 95 % interval."""


def cost_of(pairs: Sequence[tuple[Span, Span]]) -> Cost:
    """What watching costs, by ordinary least squares over the differences within pairs (without, with viewers).

    The difference of processor time is a constant, which is the cost, and a part for the difference of steps and of
    tokens each.
    """
    differences = np.array([np.subtract(on[:3], off[:3]) for off, on in pairs])
    known = np.column_stack([np.ones(len(pairs)), differences[:, 1:]])
    found, *_ = np.linalg.lstsq(known, differences[:, 0], rcond=None)
    freedom = len(pairs) - known.shape[1]
    if freedom < 1:
        return Cost(float(found[0]), float("inf"))
    rest = differences[:, 0] - known @ found
    variance = float(rest @ rest) / freedom * np.linalg.pinv(known.T @ known)[0, 0]
    return Cost(float(found[0]), student(freedom) * float(variance) ** 0.5)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, by Cornish and Fisher's expansion (1960), 0.5 % off from 4 on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def master_of(port: int) -> int:
    """The process that listens at a port of this machine."""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid is not None:
            return each.pid
    raise SystemExit(f"nobody on this machine is known to listen at port {port}: give --pid")


def cpu_s(pid: int) -> float:
    """Seconds of processor time of all threads of a process that live."""
    spent_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has just ended
            spent_ns += int(path.read_text().split()[0])
    return spent_ns / 1e9


class Server:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        key = os.environ.get("LLM_SERVING_API_KEY")
        self._head = f"Host: {self._host}\r\nConnection: close\r\n" + (
            f"Authorization: Bearer {key}\r\n" if key else ""
        )

    @asynccontextmanager
    async def open(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
        """The answer from its body on; the connection ends with it, or with the context."""
        reader, writer = await asyncio.open_connection(self._host, self.port, limit=2**22)
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


async def span(server: Server, pid: int, seconds: float, seen: list[int]) -> Span:
    """What happens in so many seconds; the readings of the server's own totals lie outside of them."""
    before, num_seen = await server.totals(), sum(seen)
    began, spent = time.perf_counter(), cpu_s(pid)
    await asyncio.sleep(seconds)
    spent, elapsed, num_seen = cpu_s(pid) - spent, time.perf_counter() - began, sum(seen) - num_seen
    after = await server.totals()
    return Span(
        spent / elapsed,
        (after.steps - before.steps) / elapsed,
        (after.tokens - before.tokens) / elapsed,
        (before.running + after.running) / 2,
        num_seen / elapsed,
    )


async def watched_span(server: Server, pid: int, seconds: float, viewers: int) -> Span:
    """A span with so many viewers, which join before it and leave behind it."""
    seen: list[int] = []
    watching = [asyncio.create_task(server.watch(seen)) for _ in range(viewers)]
    await asyncio.sleep(SETTLE_S)
    found = await span(server, pid, seconds, seen)
    await ended(watching)
    await asyncio.sleep(SETTLE_S)
    return found


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


async def measure(arguments: argparse.Namespace) -> int:
    """Measures until it is decided or the time is over; returns the exit code."""
    server, seconds, viewers = Server(arguments.url), arguments.seconds, arguments.viewers
    pid = arguments.pid or master_of(server.port)
    end = time.monotonic() + 60 * arguments.minutes
    requests = [asyncio.create_task(server.decode(arguments.max_tokens)) for _ in range(arguments.running)]
    pairs: list[tuple[Span, Span]] = []
    try:
        await span(server, pid, seconds, [])  # until all run
        while True:
            if len(pairs) % 2:
                on = await watched_span(server, pid, seconds, viewers)
                off = await span(server, pid, seconds, [])
            else:
                off = await span(server, pid, seconds, [])
                on = await watched_span(server, pid, seconds, viewers)
            pairs.append((off, on))
            cost = cost_of(pairs)
            is_decided = abs(arguments.limit - 100 * cost.mean) > 100 * cost.half_width
            if (is_decided and len(pairs) >= LEAST_PAIRS) or time.monotonic() >= end:
                break
    finally:
        await ended(requests)
    sys.stdout.write(table(pairs, viewers) + verdict(cost, pairs, arguments.limit))
    if not is_decided:
        return 2
    return int(100 * cost.mean > arguments.limit)


def table(pairs: Sequence[tuple[Span, Span]], viewers: int) -> str:
    lines = ["| viewers | running | master, % of a core | steps/s | output tok/s | pictures/s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, spans in zip(("0", str(viewers)), zip(*pairs, strict=True), strict=True):
        cpu, steps, tokens, run, pictures = (statistics.mean(each) for each in zip(*spans, strict=True))
        lines.append(f"| {name} | {run:.0f} | {100 * cpu:.2f} | {steps:.1f} | {tokens:.0f} | {pictures:.1f} |")
    return "\n".join(lines) + "\n"


def verdict(cost: Cost, pairs: Sequence[tuple[Span, Span]], limit: float) -> str:
    low, high = 100 * (cost.mean - cost.half_width), 100 * (cost.mean + cost.half_width)
    found = f"below {limit:g} %" if high < limit else f"above {limit:g} %" if low > limit else "not decided"
    pictures = statistics.mean(on.pictures for _, on in pairs)
    each = f", {1000 * cost.mean / pictures:.2f} ms a picture" if pictures else ""
    return (
        f"watching costs {100 * cost.mean:.2f} % of a core (95 % interval {low:.2f} to {high:.2f}, {len(pairs)} pairs"
        f"{each}): {found}\n"
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8835")
    parser.add_argument("--pid", type=int, help="of the master (default: who listens at the port)")
    parser.add_argument("--running", type=int, default=128, help="requests that decode (default: 128)")
    parser.add_argument("--viewers", type=int, default=1, help="streams of /v1/live (default: 1)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a span (default: 2)")
    parser.add_argument("--minutes", type=float, default=4.5, help="at most (default: 4.5)")
    parser.add_argument("--limit", type=float, default=1.0, help="per cent of a core (default: 1)")
    parser.add_argument("--max-tokens", type=int, default=400, help="of each request (default: 400)")
    return parser


if __name__ == "__main__":
    sys.exit(asyncio.run(measure(parser().parse_args())))
