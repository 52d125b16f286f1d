"""Time to the first token of a long system prompt after a restart, with and without the disk cache.

    python performance/run.py disk_cache [--model FOLDER | --shape SHAPE] [--tokens 8000] [--requests 4]

Three servers run one after the other: without a disk cache, with an empty one, and with the one that the second server
left. Each gets requests that share a system prompt of `--tokens` tokens, with other questions after it, one request
after the other. The CPU time of the first one, until its blocks are written, is that of all processes of the server.
Without `--model` the weights are random, of a shape that `run.py make_model` knows (`135m` by default).
"""

from __future__ import annotations

import argparse
import http.client
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from benchmarks.make_model import SHAPES, make_model
from harness.server_process import complete, serving

QUESTION_TOKENS: Final = 32
_VOCABULARY: Final = range(1000, 2000)
_STORED_S: Final = 120.0
"""Maximum seconds until the blocks of a prompt are written."""
COUNTERS: Final = ("queried_blocks", "hit_blocks", "read_bytes", "written_bytes")


class Figures(NamedTuple):
    """Measurements of one server."""

    first_s: float
    """Seconds of the first request, which generates one token."""
    cpu_s: float
    """CPU seconds of the server from the first request until its blocks are written."""
    later_s: float
    """Mean seconds of the later requests, which find the system prompt in memory."""
    counters: dict[str, float]
    """Values of `COUNTERS`, and the size of the folder as `bytes`."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--model", type=Path, metavar="FOLDER")
    given.add_argument("--shape", choices=tuple(SHAPES), default="135m")
    parser.add_argument("--tokens", type=int, default=8000, metavar="N", help="tokens of the system prompt")
    parser.add_argument("--requests", type=int, default=4, metavar="N")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    arguments = parser.parse_args(argv)
    if arguments.tokens < 1 or arguments.requests < 2:
        parser.error(f"--tokens must be at least 1 and --requests 2. Given: {arguments.tokens}, {arguments.requests}")
    length = arguments.tokens + QUESTION_TOKENS + 16
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            model = Path(folder) / "model"
            make_model({**SHAPES[arguments.shape], "max_position_embeddings": length}, model)
        overrides = [f"model_config.max_generate_length={length}", *arguments.set]
        cached = f"pa_config.disk_cache_path={Path(folder) / 'cache'}"
        found = {}
        servers = {
            "no disk cache": overrides,
            "empty disk cache": [*overrides, cached],
            "after a restart": [*overrides, cached],
        }
        for seed, (name, settings) in enumerate(servers.items()):
            parts = [part for each in settings for part in ("--set", each)]
            command = [sys.executable, "-m", "llm_serving", "serve", "--model", str(model), *parts]
            with serving(command) as (port, process):
                server = Server(port, psutil.Process(process.pid), stores=cached in settings)
                found[name] = measure(server, arguments.tokens, arguments.requests, seed)
    print(table(found))
    return 0


class Server(NamedTuple):
    port: int
    process: psutil.Process
    stores: bool
    """Whether it has a disk cache."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its processes."""
        times = [each.cpu_times() for each in (self.process, *self.process.children(recursive=True))]
        return sum(each.user + each.system for each in times)


def measure(server: Server, num_tokens: int, num_requests: int, seed: int) -> Figures:
    """Measure one server. `seed`: seed of the random questions."""
    port = server.port
    system = random.Random("system prompt").choices(_VOCABULARY, k=num_tokens)
    rng = random.Random(seed)
    questions = [rng.choices(_VOCABULARY, k=QUESTION_TOKENS) for _ in range(num_requests)]
    complete(port, questions[0][:4], 2)
    before_s = server.cpu_s
    first_s = complete(port, [*system, *questions[0]], 1)
    if server.stores:
        _stored(port)
    cpu_s = server.cpu_s - before_s
    later_s = sum(complete(port, [*system, *question], 1) for question in questions[1:]) / (num_requests - 1)
    return Figures(first_s, cpu_s, later_s, _stored(port) if server.stores else counters(port))


def _stored(port: int) -> dict[str, float]:
    """Return the counters once no more blocks are written."""
    before, deadline = counters(port), time.monotonic() + _STORED_S
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = counters(port)
        if now == before:
            return now
        before = now
    raise SystemExit(f"the blocks were not written within {_STORED_S:g} s")


def counters(port: int) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    names = {name: f"disk_cache_{name}_total" for name in COUNTERS} | {"bytes": "disk_cache_bytes"}
    return {name: _value(text, metric) for name, metric in names.items()}


def _value(text: str, metric: str) -> float:
    found = re.search(rf"^llm_serving:{metric}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def table(found: dict[str, Figures]) -> str:
    """Return a Markdown table with a row for each server."""
    rows = [
        [
            "",
            "first request, s",
            "its CPU time, s",
            "later requests, s",
            "hit rate",
            "read, MB",
            "written, MB",
            "folder, MB",
        ],
        ["---", *["---:"] * 7],
    ]
    for name, (first_s, cpu_s, later_s, counted) in found.items():
        queried = counted["queried_blocks"]
        rate = f"{counted['hit_blocks'] / queried:.3f}" if queried else ""
        sizes = (f"{max(0.0, counted[each]) / 1e6:,.1f}" for each in ("read_bytes", "written_bytes", "bytes"))
        rows.append([name, f"{first_s:.2f}", f"{cpu_s:.2f}", f"{later_s:.3f}", rate, *sizes])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
