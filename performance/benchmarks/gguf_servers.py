"""One GGUF file served by this server and by llama.cpp's, in turns: speed and memory.

    python performance/run.py gguf_servers --model FILE.gguf --llama-server PATH [--rounds 2]

Each round starts one server after the other with two threads, without draft tokens, and measures it over HTTP with
the same token ids: one stream of 256 tokens, a prompt of 1,000 tokens, 16 requests of 32 + 128 tokens at once, and the
proportional set size of all processes of the server, at rest and after this load. llama.cpp gets 16 slots and the
default context of this server, 2,048 tokens for each. The table has the median of all rounds.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from harness.server_process import complete, serving

_AT_ONCE = 16
_REPEATS = 3
"""Measurements of one stream and of a prompt in each round."""
_CONTEXT = 2048
_VOCABULARY = range(1000, 20000)
"""Token ids of prompts: words in every vocabulary that GGUF files of chat models have."""
FIGURES = {
    "one stream, tok/s": True,
    "prompt of 1,000 tokens, s": False,
    "16 requests at once, tok/s": True,
    "memory at rest, MB": False,
    "memory after the load, MB": False,
}
"""Figure -> whether more is better."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--llama-server", metavar="PATH", help="executable of llama.cpp; without it, only this server")
    parser.add_argument("--rounds", type=int, default=2, metavar="N")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override any key")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error(f"--rounds must be at least 1. Given: {arguments.rounds}")
    if arguments.llama_server is not None and shutil.which(arguments.llama_server) is None:
        parser.error(f"--llama-server must be an executable file. Given: {arguments.llama_server}")
    overrides = ["scheduler_config.speculative_method=none", "device_config.num_threads=2", *arguments.set]
    settings = [part for override in overrides for part in ("--set", override)]
    ours = [sys.executable, "-m", "llm_serving", "serve", "--model", str(arguments.model), *settings]
    commands = {"this server": ours}
    if arguments.llama_server is not None:
        slots = ["-np", str(_AT_ONCE), "-c", str(_AT_ONCE * _CONTEXT), "-t", "2"]
        commands["llama.cpp"] = [arguments.llama_server, "-m", str(arguments.model), *slots]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(arguments.rounds):
        for name, command in commands.items():
            with serving(command) as (port, process):
                found[name].append(_measure(port, process, seed=number))
                print(f"{name}, round {number + 1}: {found[name][-1]}", file=sys.stderr)
    print(table({name: medians(rounds) for name, rounds in found.items()}))
    return 0


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(each[figure] for each in rounds) for figure in FIGURES}


def table(found: dict[str, dict[str, float]]) -> str:
    """Return a Markdown table; with two servers, its last column says how many times better the first one is."""
    names = list(found)
    rows = [
        ["", *names, *(["times better"] if len(names) == 2 else [])],
        ["---"] * (len(names) + (len(names) == 2) + 1),
    ]
    for figure, more_is_better in FIGURES.items():
        values = [found[name][figure] for name in names]
        row = [figure, *(f"{value:,.2f}" if value < 10 else f"{value:,.1f}" for value in values)]
        if len(values) == 2:
            row.append(f"{values[0] / values[1] if more_is_better else values[1] / values[0]:.2f}")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _measure(port: int, process: subprocess.Popen[bytes], seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    ids = lambda count: rng.choices(_VOCABULARY, k=count)  # noqa: E731
    complete(port, ids(8), 8)
    at_rest = _memory(process)
    rates, prompts = [], []
    for _ in range(_REPEATS):
        first = complete(port, ids(16), 1)
        rates.append(256 / (complete(port, ids(16), 257) - first))
        prompts.append(complete(port, ids(1000), 1))
    begin = time.perf_counter()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(lambda prompt: complete(port, prompt, 128), [ids(32) for _ in range(_AT_ONCE)]))
    at_once = _AT_ONCE * 128 / (time.perf_counter() - begin)
    values = statistics.median(rates), statistics.median(prompts), at_once, at_rest, _memory(process)
    return dict(zip(FIGURES, values, strict=True))


def _memory(process: subprocess.Popen[bytes]) -> float:
    """Return the MB of all processes of a server; memory that several share is counted once (PSS)."""
    first = psutil.Process(process.pid)
    return sum(each.memory_full_info().pss for each in (first, *first.children(recursive=True))) / 1e6


if __name__ == "__main__":
    sys.exit(main())
