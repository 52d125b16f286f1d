"""Starts every family that Ascend serves in every mode: `PYTHONPATH=tests python -m ascend.all_families`.

It takes minutes, then prints a line for each mode, and fails if a model does not start or a call breaks a rule of CANN.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Final

from ascend.arguments import check
from ascend.cann_stubs import build
from ascend.models import FAMILIES, MORE_FAMILIES, write_models
from ascend.processes import DECODES, PROMPT, Process, start

TIMEOUT_S: Final = 3600
DTYPES: Final = "float16", "bfloat16"
MODES: Final = (
    ("exact", 16, None, True),
    ("exact", 16, None, False),
    ("exact", 128, "w8a8", False),
    ("fast", 128, None, False),
    ("fast", 16, "w8a8", False),
)
"""Exactness, tokens of a block, quantization, and whether batch-invariant products are installed."""


def main() -> int:
    families = (*FAMILIES, *MORE_FAMILIES)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("stubs", "models", "run"):
            (folder / each).mkdir()
        cann, models = build(folder / "stubs"), write_models(folder / "models", families)
        processes = {}
        for dtype, (exactness, block_size, quantization, invariant) in itertools.product(DTYPES, MODES):
            settings = {"dtype": dtype, "exactness": exactness, "block_size": block_size, "quantization": quantization}
            jobs = [
                {"name": family, "folder": family, "steps": (DECODES[0], PROMPT), **settings} for family in families
            ]
            name = f"{settings}{' with invariant products' if invariant else ''}"
            processes[name] = Process(jobs, {"processors": 16}, invariant)
        for name, ended in start(processes, cann, models, folder / "run", timeout_s=TIMEOUT_S).items():
            missing = [family for family in families if family not in ended.jobs]
            for job in ended.jobs.values():
                for call in set(job.calls):
                    check(call)
            failed |= bool(missing)
            started = f"{len(ended.jobs)} of {len(families)} started"
            wrong = f", not {missing[0]}:\n{ended.output[-2000:]}" if missing else ""
            sys.stdout.write(f"{name}: {started}{wrong}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
