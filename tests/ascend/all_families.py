"""Starts every family that Ascend serves in every mode: `PYTHONPATH=tests python -m ascend.all_families`.

It prints a line for each mode when it ends, which takes minutes, and fails if a model does not start or a call breaks a
rule of CANN. `--dtype bfloat16` leaves out the modes of the other dtype.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ascend.arguments import ArgumentError, check
from ascend.cann_stubs import build
from ascend.models import FAMILIES, MORE_FAMILIES, write_models
from ascend.processes import DECODES, PROMPT, Process
from ascend.runs import Ended, read, run_all

TIMEOUT_S: Final = 6 * 3600
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
    parser = argparse.ArgumentParser(prog="python -m ascend.all_families")
    parser.add_argument("--dtype", choices=DTYPES, help="run the modes of this dtype only")
    only = parser.parse_args().dtype
    families = (*FAMILIES, *MORE_FAMILIES)
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("stubs", "models", "run"):
            (folder / each).mkdir()
        cann, models = build(folder / "stubs"), write_models(folder / "models", families)
        requests = []
        for dtype, (exactness, block_size, quantization, invariant) in itertools.product(
            [only] if only else DTYPES, MODES
        ):
            settings = {"dtype": dtype, "exactness": exactness, "block_size": block_size, "quantization": quantization}
            jobs = [
                {"name": family, "folder": family, "steps": (DECODES[0], PROMPT), **settings} for family in families
            ]
            own = folder / "run" / str(len(requests))
            own.mkdir()
            name = f"{settings}{' with invariant products' if invariant else ''}"
            requests.append(Process(jobs, {"processors": 16}, invariant).request(name, models, own))
        for request, code in run_all(cann, requests, timeout_s=TIMEOUT_S):
            wrong = wrong_in(read(request, code), families)
            failed |= bool(wrong)
            sys.stdout.write(f"{request.name}: {'; '.join(wrong) or f'all {len(families)} start'}\n")
            sys.stdout.flush()
    return int(failed)


def wrong_in(ended: Ended, families: Sequence[str]) -> list[str]:
    """Return the families that did not start, with the end of the output, and the calls that break a rule."""
    missing = [family for family in families if family not in ended.jobs]
    wrong = [f"not started: {', '.join(missing)}\n{ended.output[-2000:]}"] if missing else []
    for family, job in ended.jobs.items():
        for call in set(job.calls):
            try:
                check(call)
            except ArgumentError as error:
                wrong.append(f"{family}: {error}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
