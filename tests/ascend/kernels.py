"""Which kernel computes each operation of a model, and what a step copies.

PYTHONPATH=tests python -m ascend.kernels    writes the table `kernels.json`
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ascend.processes import PROCESSES
from ascend.runs import Ended, Job

TABLE: Final = Path(__file__).with_name("kernels.json")

_OF_CANN: Final = {
    "Add": "aclnnAdd",
    "AddExt": "aclnnAdd",
    "AddScalar": "aclnnAdds",
    "ArgMaxWithValue": "aclnnMaxDim",
    "Cast": "aclnnCast",
    "Concat": "aclnnCat",
    "CumsumExt": "aclnnCumsum",
    "Div": "aclnnDiv",
    "DynamicQuantExt": "aclnnDynamicQuant",
    "Equal": "aclnnEqTensor",
    "Exp": "aclnnExp",
    "Floor": "aclnnFloor",
    "FloorDiv": "aclnnFloorDivide",
    "GatherD": "aclnnGather",
    "Greater": "aclnnGtTensor",
    "GreaterEqual": "aclnnGeTensor",
    "GroupedMatmulV4": "aclnnGroupedMatmulV4",
    "IndexSelect": "aclnnIndexSelect",
    "InnerMoeTokenUnpermute": "aclnnMoeTokenUnpermute",
    "Less": "aclnnLtTensor",
    "LessEqual": "aclnnLeTensor",
    "MaskedFill": "aclnnInplaceMaskedFillTensor",
    "MatMulExt": "aclnnMatmul",
    "Maximum": "aclnnMaximum",
    "Minimum": "aclnnMinimum",
    "MoeGatingTopKSoftmax": "aclnnMoeGatingTopKSoftmax",
    "MoeInitRoutingQuantV2": "aclnnMoeInitRoutingQuantV2",
    "MoeInitRoutingV2": "aclnnMoeInitRoutingV2",
    "Mul": "aclnnMul",
    "Muls": "aclnnMuls",
    "NanToNum": "aclnnNanToNum",
    "QuantBatchMatmul": "aclnnQuantMatmulV4",
    "ReduceMax": "aclnnAmax",
    "RmsNorm": "aclnnRmsNorm",
    "Select": "aclnnSWhere",
    "Sigmoid": "aclnnSigmoid",
    "SliceExt": "aclnnSlice",
    "SplitWithSize": "aclnnSplitWithSize",
    "Sub": "aclnnSub",
    "SumExt": "aclnnReduceSum",
    "TopkExt": "aclnnTopk",
    "Transpose": "aclnnPermute",
    "Zeros": "aclnnInplaceZero",
}
"""Operation -> the function of CANN that computes it."""
PARTS: Final = "kernels", "drawing kernels", "other kernels"
"""Parts of a row: the kernels of the graph of single tokens, of the graphs that draw tokens, and of the others."""
IGNORED: Final = "name", "folder", "steps", "num_ahead", "draws"
"""Fields of a job that are not settings of the model."""
_RUNTIME: Final = {"MoveTo", "RealMakeTuple", "RealTupleGetItem", "Reshape"}
"""Copies to the host, and operations that change no data."""
_ATB: Final = {"FlashAttentionScore", "PagedAttention"}
"""Operations of MindSpore's library whose own kernels are disabled, so that ATB's compute them."""


def kernels_of(job: Job, nodes: Iterable[str]) -> dict[str, str]:
    """Return the kernel of each operation: `ATB`, `internal` (MindSpore's library), a function of CANN, `TBE` (compiled
    by CANN), `runtime` or `CPU`.
    """
    called = {call.split()[0] for call in job.calls}
    compiled = {call.split()[1] for call in job.calls if call.startswith("aclop ")}

    def kernel(node: str) -> str:
        if node in job.internal:
            return "ATB" if node in _ATB else "internal"
        if node in compiled:
            return "TBE"
        if _OF_CANN.get(node) in called:
            return _OF_CANN[node]
        return "runtime" if node in _RUNTIME else "CPU"

    return {node: kernel(node) for node in sorted(nodes)}


def rows_of(name: str, ended: Ended) -> dict[str, Any]:
    """Return the rows of the table for a process: of each model its settings, `PARTS`, and the counts of each step."""
    rows = {}
    for job in PROCESSES[name].jobs:
        found = ended.jobs[job["name"]]
        settings = {key: value for key, value in job.items() if key not in IGNORED}
        steps = [
            {"rows": len(rows), "tokens": sum(tokens for tokens, _ in rows), "sampling": sampling} | counts
            for rows, runs in zip(job.get("steps", ()), found.found["steps"], strict=True)
            for sampling, counts in runs.items()
        ]
        rows[f"{job['name']} ({name})"] = {
            "settings": settings,
            "kernels": kernels_of(found, found.token_graph),
            "drawing kernels": kernels_of(found, found.drawing_graphs),
            "other kernels": kernels_of(found, found.other_graphs),
            "steps": steps,
        }
    return rows


def read_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def main() -> None:
    from ascend.cann_stubs import build
    from ascend.models import write_models
    from ascend.processes import start

    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, each) for each in ("stubs", "models", "run")]
        for folder in folders:
            folder.mkdir()
        stubs, models, run = folders
        processes = {name: process for name, process in PROCESSES.items() if process.in_table}
        ended = start(processes, build(stubs), write_models(models), run)
    write_table({model: row for name in processes for model, row in rows_of(name, ended[name]).items()})


def write_table(table: dict[str, Any]) -> None:
    """Write one line for each operation and step."""
    lines = ["{"]
    for index, (name, row) in enumerate(table.items()):
        lines += [f" {json.dumps(name)}: {{", f'  "settings": {json.dumps(row["settings"])},']
        for part in PARTS:
            nodes = [f"   {json.dumps(node)}: {json.dumps(kernel)}" for node, kernel in row[part].items()]
            whole = ["{", ",\n".join(nodes), "  },"] if nodes else ["{},"]
            lines += [f"  {json.dumps(part)}: {whole[0]}", *whole[1:]]
        lines.append('  "steps": [')
        lines += [",\n".join(f"   {json.dumps(step)}" for step in row["steps"]), "  ]"]
        lines.append(" }" if index == len(table) - 1 else " },")
    TABLE.write_text("\n".join([*lines, "}"]) + "\n")


if __name__ == "__main__":
    main()
