"""The processes that tests read: machines and devices of several sizes, each with some models and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ascend.cann_stubs import invariant_products
from ascend.forks import Request
from ascend.models import FAMILIES
from ascend.runs import Ended, read, request, run_all

ALONE: Final = ((1, 299),)
PROMPT: Final = ((16, 0),)
STEPS: Final = (
    ALONE,
    ((1, 299), *((1, 19),) * 7),
    ((1, 299), (1, 6999)),
    ((1, 299), (16, 0)),
    ((1, 299), *((1, 19),) * 130),
    PROMPT,
    ((2000, 10),),
)
"""Steps with a row whose context is 300 tokens, alone and beside others, and steps of prompts. A row is (its tokens in
the step, tokens of its context before them).
"""
SQUARE: Final = ((1, 79), (79, 0))
"""A step with as many tokens as its mask has columns."""
STEPS_OF_FAMILIES: Final = (*STEPS[:5], SQUARE)
DECODES: Final = (((1, 40),) * 4, ((1, 40),) * 32)
NUM_AHEAD: Final = 4


@dataclass(frozen=True)
class Process:
    jobs: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `runs.request`."""
    invariant: bool = False
    """Whether batch-invariant products are installed."""

    @property
    def in_table(self) -> bool:
        """Whether `kernels.json` has the models of this process; false if a job leaves out a setting."""
        return not any("without" in job for job in self.jobs)

    def request(self, name: str, models: Mapping[str, Path], folder: Path) -> Request:
        """Return the request for this process in an empty folder. `models`: as `models.write_models` returns them."""
        jobs = [{**job, "folder": str(models[job["folder"]])} for job in self.jobs]
        invariant = invariant_products(folder) if self.invariant else {}
        return request(name, "device", jobs, folder, **self.machine, **invariant)


def start(
    processes: Mapping[str, Process], cann: Mapping[str, str], models: Mapping[str, Path], folder: Path, **options: Any
) -> dict[str, Ended]:
    """Run processes in an empty folder. Return what each found.

    Args:
        cann: The environment that `cann_stubs.build` returns.
        models: The folders that `models.write_models` returns.
        options: Of `runs.run_all`.
    """
    requests = []
    for name, process in processes.items():
        (folder / name).mkdir()
        requests.append(process.request(name, models, folder / name))
    return {each.name: read(each, code) for each, code in run_all(cann, requests, **options)}


def _job(name: str, folder: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "folder": folder, **fields}


_ONE_STEP: Final = {"steps": (DECODES[0],)}
GB: Final = 2**30

PROCESSES: Final[Mapping[str, Process]] = {
    "exact": Process(
        [_job("demo", "demo", steps=STEPS, max_model_len=8192, num_ahead=NUM_AHEAD, draws=True)],
        {"processors": 4, "gigabytes": 64},
        invariant=True,
    ),
    "families": Process(
        [
            _job("demo", "demo", steps=STEPS_OF_FAMILIES, max_model_len=8192, num_ahead=NUM_AHEAD),
            *(_job(name, name, **_ONE_STEP) for name in FAMILIES),
        ],
        {"processors": 8, "gigabytes": 32, "soc": "Ascend910_9391"},
    ),
    "fast": Process(
        [_job("demo", "demo", dtype="bfloat16", exactness="fast", block_size=128, steps=STEPS[:1] + STEPS[5:6])],
        {"processors": 16, "gigabytes": 32},
    ),
    "quantized": Process(
        [
            _job("demo", "demo", quantization="w8a8", **_ONE_STEP),
            _job("experts", "qwen3, experts", quantization="w8a8", dtype="bfloat16", **_ONE_STEP),
        ],
        {"processors": 32, "gigabytes": 64},
    ),
    "limited": Process(
        [
            _job("demo", "demo", dtype="bfloat16", max_device_memory=58 * GB, steps=(DECODES[1],)),
            _job("large", "large", dtype="bfloat16", max_device_memory=58 * GB),
        ],
        {"processors": 64, "gigabytes": 32},
    ),
    "small mask": Process(
        [_job("demo", "demo", exactness="fast", block_size=128, without="whole mask")],
        {"processors": 16, "gigabytes": 32},
    ),
    "without threads": Process([_job("demo", "demo", without="threads")], {"processors": 8}),
    "without swiglu": Process([_job("demo", "demo", without="swiglu")]),
}
