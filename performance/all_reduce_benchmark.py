"""Time of one sum over ranks: python performance/all_reduce_benchmark.py [--ranks 2] [--rows 1,32,512] [--columns 2048]

Processes of one thread each add up bfloat16 rows, one sum after another, as two are added up in each layer with
`tensor_parallel`: microseconds of a sum as rank 0 sees it, the middle one and the 99th of 100. Whoever comes late is
waited for. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
from llm_serving.kernels.ranks import Ranks
from llm_serving.transport.rank_memory import rank_memory

NUM_SUMS = 2000
NUM_BEFORE = 100
"""Sums that are not counted: memory is touched for the first time."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.memory_fd is not None:
        _add_up(arguments)
        return 0
    with rank_memory(arguments.ranks) as fd:
        command = [sys.executable, *sys.argv, "--memory-fd", str(fd)]
        environment = {**os.environ, "LLM_SERVING_THREADS": "1"}
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], pass_fds=(fd,), env=environment)  # noqa: S603
            for rank in range(arguments.ranks)
        ]
        return max(process.wait() for process in processes)


def _add_up(arguments: argparse.Namespace) -> None:
    ranks = Ranks(arguments.memory_fd, arguments.rank, arguments.ranks)
    for num_rows in arguments.rows:
        part = np.full((num_rows, arguments.columns), 0x3F80, np.uint16)  # ones
        seconds = []
        for _ in range(NUM_BEFORE + NUM_SUMS):
            began = time.perf_counter()
            ranks.all_reduce(part, "bfloat16")
            seconds.append(time.perf_counter() - began)
        if arguments.rank == 0:
            middle, late = 1e6 * np.quantile(seconds[NUM_BEFORE:], (0.5, 0.99))
            shape = f"[{num_rows}, {arguments.columns}]"
            print(
                f"{arguments.ranks} ranks, bfloat16 {shape:12} p50 {middle:8,.0f} us   p99 {late:8,.0f} us", flush=True
            )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=lambda text: [int(each) for each in text.split(",")], default=[1, 32, 512])
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory-fd", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
