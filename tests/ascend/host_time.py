"""Time of the host for one decode step, on stubs of CANN: `PYTHONPATH=tests python -m ascend.host_time`.

Kernels compute nothing, so the time is that of the inputs, of MindSpore's runtime, of the tiling of kernels and of
sampling on the host.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from ascend.cann_stubs import build
from ascend.models import write_models
from ascend.processes import Process, start

ROWS: Final = (1, 32, 128)
CONTEXT: Final = 299
NUM_TIMED: Final = 200
LAYERS: Final = 4


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, each) for each in ("stubs", "models", "run")]
        for folder in folders:
            folder.mkdir()
        stubs, models, run = folders
        steps = tuple(((1, CONTEXT),) * count for count in ROWS)
        job = {"name": "demo", "folder": "demo", "block_size": 128, "steps": steps, "num_timed": NUM_TIMED}
        process = Process([job], {"processors": 16, "traced": False})
        ended = start(process, build(stubs), write_models(models, (), demo_layers=LAYERS), run)
    sys.stdout.write("| rows | greedy, ms | drawn, ms |\n| --- | --- | --- |\n")
    for count, runs in zip(ROWS, ended.jobs["demo"].found["steps"], strict=True):
        times = (f"{runs[sampling]['seconds'] * 1e3:.2f}" for sampling in ("greedy", "drawn"))
        sys.stdout.write(f"| {count} | {' | '.join(times)} |\n")


if __name__ == "__main__":
    main()
