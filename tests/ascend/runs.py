"""Processes that run `device.py` on the stubs of CANN, and what their kernels printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ascend.device import MARK

SCRIPT: Final = Path(__file__).with_name("device.py")
TIMEOUT_S: Final = 300

_PLAN: Final = re.compile(
    r"split Core BN\w* end formerbatch: (?P<rows>\d+) formerHeadSplit: (?P<heads>\d+) tailBatch:(?P<tail>\d+) "
    r"kvSplitPerCore: (?P<keys>\d+) kvSplitCoreNum:(?P<key_splits>\d+) blockDim:\d+.*?"
    r"formerGroupNumMove: (?P<group>\d+).*?tiling block size calc: (?P<keys_at_once>\d+).*?tilingKey: (?P<key>\d+)",
    re.DOTALL,
)
_INTERNAL: Final = re.compile(r"Supported by InternalKernel: (\w+)")
_NODE: Final = re.compile(r"PrintGraphExecuteOrder\] Index\[\d+\].*?ValueNode<Primitive> (?:PrimFunc_)?(\w+)")


@dataclass(frozen=True)
class Plan:
    """How PagedAttention splits the rows of one token of a step."""

    rows: int
    heads: int
    """Number of heads that a core computes together."""
    tail: int
    """Number of rows that are split in another way than the first `rows`."""
    keys: int
    """Maximum number of keys of a row that one core adds."""
    key_splits: int
    """Number of cores over which the keys of a row are split."""
    group: int
    """Number of heads that share keys and are multiplied together."""
    keys_at_once: int
    key: int
    """The tiling key, which selects the compiled kernel."""

    @property
    def of_a_row(self) -> tuple[int, ...]:
        """The numbers that decide in which order the sums of a row are added."""
        return self.heads, self.tail, self.key_splits, self.group, self.keys_at_once, self.key


@dataclass(frozen=True)
class Job:
    """What one job found and printed."""

    found: Mapping[str, Any]
    output: str
    trace: str

    def output_of_step(self, index: int) -> str:
        return _between(self.output, f"first {index}", f"end {index}")

    def plan(self, index: int) -> Plan:
        """Return the plan of PagedAttention in a step, which must have rows of one token."""
        match = _PLAN.search(self.output_of_step(index))
        assert match is not None, self.output_of_step(index)[-3000:]
        return Plan(**{name: int(value) for name, value in match.groupdict().items()})

    @property
    def nodes(self) -> Counter[str]:
        """Operations of the graphs, by name."""
        return Counter(_NODE.findall(self.output))

    @property
    def internal(self) -> set[str]:
        """Operations with kernels of MindSpore's own library or of ATB, which it contains."""
        return set(_INTERNAL.findall(self.output))

    @property
    def calls(self) -> list[str]:
        """Calls of CANN's operators with their arguments: `aclnnName ARGUMENT ...` or `aclop Name`."""
        return [line for line in self.trace.splitlines() if line.startswith("acl")]


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    returncode: int
    output: str
    jobs: Mapping[str, Job]


def run(
    cann: Mapping[str, str],
    folder: Path,
    jobs: Sequence[Mapping[str, Any]],
    *,
    processors: int = 32,
    gigabytes: int = 64,
    soc: str = "Ascend910B2",
) -> Ended:
    """Run jobs, which are the fields of `device.Job`, on a machine and device of this size."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "ASCEND_", "FAKE_"))}
    trace, home = folder / "trace.txt", folder / "home"
    home.mkdir()
    environment = own | cann | {
        "FAKE_PROCESSORS": str(processors),
        "FAKE_HBM_GB": str(gigabytes),
        "FAKE_SOC": soc,
        "FAKE_TRACE": str(trace),
        # Print the plans of kernels, the order of operations, and which of them MindSpore's own library computes.
        "INTERNAL_PRINT_TILING": "1",
        "ASCEND_GLOBAL_LOG_LEVEL": "1",
        "ASCEND_SLOG_PRINT_TO_STDOUT": "1",
        "MS_SUBMODULE_LOG_v": "{SESSION:1,ME:1}",
        # Kernels write log files there.
        "ASCEND_PROCESS_LOG_PATH": str(home),
    }  # fmt: skip
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=json.dumps(list(jobs)),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    traced = trace.read_text() if trace.exists() else ""
    found = [json.loads(line) for line in re.findall(rf"^{MARK}(\{{.*)$", ended.stdout, re.MULTILINE)]
    by_name = {
        each["job"]: Job(each, *(_between(text, f"load {each['job']}", None) for text in (ended.stdout, traced)))
        for each in found
    }
    return Ended(ended.returncode, ended.stdout, by_name)


def _between(text: str, first: str, last: str | None) -> str:
    """Return the text between two marks; without `last`, up to the next mark `load`."""
    start = text.index(f"{MARK} {first}\n")
    end = text.find(f"{MARK} load" if last is None else f"{MARK} {last}\n", start + len(MARK))
    return text[start : end if end >= 0 else len(text)]
