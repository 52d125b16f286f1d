"""CPU time of a WorkAgent for one decode step on Ascend, on stubs of CANN.

    python performance/run.py ascend_host [--rows 1,32,128] [--layers 4] [--vocab 151936]

It runs MindSpore's Ascend plugin as the tests in `tests/ascend` do, so it needs g++ and x86-64. Kernels compute
nothing: the time is that of the inputs, of MindSpore's runtime, of the tiling of kernels and of sampling on the host.
Prints for each number of rows and kind of sampling the CPU time without a decode graph (two graphs, all tokens sampled
on the host), and as a share of it the time with the decode graph, and with tokens that the device draws.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

CONTEXT: Final = 299
NUM_TIMED: Final = 10
TIMEOUT_S: Final = 3600
TESTS: Final = Path(__file__).resolve().parents[2] / "tests"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    rows = [int(each) for each in arguments.rows.split(",")]
    found = measured(rows, {"num_hidden_layers": arguments.layers, "vocab_size": arguments.vocab})
    sys.stdout.write("| rows | sampling | two graphs, ms | decode graph | drawn by the device |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- |\n")
    for index, count in enumerate(rows):
        before, after = (found[name]["steps"][index] for name in ("two graphs", "decode graph"))
        for name, on_host, on_device in (
            ("greedy", "greedy", None),
            ("temperature", "drawn on the host", "drawn"),
            ("temperature, top_k 40, top_p 0.9", "limited on the host", "limited"),
            ("temperature, top_p 0.9", "nucleus on the host", "nucleus"),
        ):
            whole = before[on_host]["cpu_seconds"]
            shares = [f"{after[each]['cpu_seconds'] / whole:.2f}" if each else "" for each in (on_host, on_device)]
            sys.stdout.write(f"| {count} | {name} | {whole * 1e3:.2f} | {' | '.join(shares)} |\n")
    return 0


def measured(rows: Sequence[int], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `tests/ascend/device.py` found for the shipped model with these changes of its configuration, without
    and with a decode graph.
    """
    sys.path.insert(0, str(TESTS))
    from ascend.cann_stubs import build
    from ascend.models import write_models
    from ascend.processes import Process, start

    steps = tuple(((1, CONTEXT),) * count for count in rows)
    job = {"folder": "demo", "block_size": 128, "steps": steps, "num_timed": NUM_TIMED}
    jobs = [
        {**job, "name": "two graphs", "without": "decode graph"},
        {**job, "name": "decode graph", "draws": True},
    ]
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, each) for each in ("stubs", "models", "run")]
        for folder in folders:
            folder.mkdir()
        stubs, models, run = folders
        processes = {"steps": Process(jobs, {"processors": 16})}
        folders_of_models = write_models(models, (), demo=changes)
        ended = start(processes, build(stubs), folders_of_models, run, traced=False, timeout_s=TIMEOUT_S)["steps"]
    if ended.returncode != 0:
        raise RuntimeError(ended.output[-3000:])
    return {each: ended.jobs[each].found for each in ended.jobs}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,128", help="numbers of rows of a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=151_936, help="number of tokens of the vocabulary")
    return parser.parse_args(argv)
