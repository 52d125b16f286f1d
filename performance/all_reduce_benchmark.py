"""Time of one sum over ranks: python performance/all_reduce_benchmark.py [--ranks 2] [--rows 1,32,512] [--columns 2048]

Processes of one thread each add up bfloat16 rows, one sum after another, as two are added up in each layer with
`tensor_parallel`: microseconds of a sum as rank 0 sees it, the middle one and the 99th of 100. Whoever comes late is
waited for. Then the same by MindSpore's collectives on a CPU (MCCL), as graphs add up: in the order of ranks, with the
same bits. Needs the package: run it with its interpreter.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from llm_serving.kernels.ranks import Ranks
from llm_serving.transport.shared_memory import rank_memory

NUM_SUMS = 500
NUM_BEFORE = 100
"""Sums that are not counted: memory is touched for the first time."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.rank is not None:
        _add_up(arguments)
        os._exit(0)  # MindSpore's processes would wait for each other
    with rank_memory(arguments.ranks) as fd:
        failed = _run(arguments.ranks, ["--memory-fd", str(fd)], fd)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return failed or _run(arguments.ranks, ["--port", str(port)])


def _run(count: int, more: Sequence[str], *inherited: int) -> int:
    """The largest exit code of so many ranks."""
    quiet = {"MS_SUBMODULE_LOG_v": "{DISTRIBUTED:4,DEVICE:4}"}  # otherwise it tells of all that wait
    environment = {**os.environ, **quiet, "LLM_SERVING_THREADS": "1"}
    command = [sys.executable, *sys.argv, *more]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], pass_fds=inherited, env=environment)  # noqa: S603
        for rank in range(count)
    ]
    return max(process.wait() for process in processes)


def _in_memory(arguments: argparse.Namespace) -> Callable[[int], Callable[[], object]]:
    """Number of rows -> adds them up."""
    ranks = Ranks(arguments.memory_fd, arguments.rank, arguments.ranks)

    def of(num_rows: int) -> Callable[[], object]:
        part = np.full((num_rows, arguments.columns), 0x3F80, np.uint16)  # ones
        return lambda: ranks.all_reduce(part, "bfloat16")

    return of


def _by_collectives(arguments: argparse.Namespace) -> Callable[[int], Callable[[], object]]:
    import mindspore as ms
    from llm_serving.backends.ascend import OrderedSum
    from llm_serving.worker.rank_group import CollectiveGroup

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    CollectiveGroup(arguments.rank, arguments.ranks, arguments.port, "CPU")
    add_up = OrderedSum()

    def of(num_rows: int) -> Callable[[], object]:
        part = ms.Tensor(np.ones((num_rows, arguments.columns), np.float32)).astype(ms.bfloat16)
        return lambda: add_up(part)

    return of


def _add_up(arguments: argparse.Namespace) -> None:
    of = _by_collectives(arguments) if arguments.memory_fd is None else _in_memory(arguments)
    by = "MCCL" if arguments.memory_fd is None else "memory"
    for num_rows in arguments.rows:
        add_up, seconds = of(num_rows), []
        for _ in range(NUM_BEFORE + NUM_SUMS):
            began = time.perf_counter()
            add_up()
            seconds.append(time.perf_counter() - began)
        if arguments.rank == 0:
            middle, late = 1e6 * np.quantile(seconds[NUM_BEFORE:], (0.5, 0.99))
            shape = f"[{num_rows}, {arguments.columns}]"
            figures = f"p50 {middle:8,.0f} us   p99 {late:8,.0f} us"
            print(f"{arguments.ranks} ranks, {by:6}, bfloat16 {shape:12} {figures}", flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=lambda text: [int(each) for each in text.split(",")], default=[1, 32, 512])
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
