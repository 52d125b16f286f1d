"""Processes on the stubs of CANN, and what their kernels printed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ascend.device import MARK
from ascend.forks import TRACE, Request

SCRIPT: Final = Path(__file__).with_name("forks.py")
TIMEOUT_S: Final = 900
PRINTING: Final = {
    "INTERNAL_PRINT_TILING": "1",
    "ASCEND_GLOBAL_LOG_LEVEL": "1",
    "ASCEND_SLOG_PRINT_TO_STDOUT": "1",
    "MS_SUBMODULE_LOG_v": "{SESSION:1,ME:1}",
}
"""Prints the plans of kernels, the order of operations, and which of them MindSpore's own library computes."""

_PLAN: Final = re.compile(
    r"split Core BN\w* end formerbatch: (?P<rows>\d+) formerHeadSplit: (?P<heads>\d+) tailBatch:(?P<tail>\d+) "
    r"kvSplitPerCore: (?P<keys>\d+) kvSplitCoreNum:(?P<key_splits>\d+) blockDim:\d+.*?"
    r"formerGroupNumMove: (?P<group>\d+).*?tiling block size calc: (?P<keys_at_once>\d+).*?tilingKey: (?P<key>\d+)",
    re.DOTALL,
)
_ATTENTION: Final = re.compile(r"ValueNode<Primitive> PrimFunc_FlashAttentionScore, (.*?)\}\]")
_INPUT: Final = re.compile(r"\[\d+\]: (.*?)(?=, \[\d+\]: |$)")
_INTERNAL: Final = re.compile(r"Supported by InternalKernel: (\w+)")
_NODE: Final = re.compile(r"PrintGraphExecuteOrder\] Index\[(\d+)\].*?ValueNode<Primitive> (?:PrimFunc_)?(\w+)")


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


class Mask(NamedTuple):
    """What PagedAttention reads of a mask."""

    kind: int
    """`NO_MASK`, `ROW_FOR_EACH_TOKEN`, or another number of ATB's `MaskType`."""
    columns: int
    first_elements: Mapping[int, tuple[int, int]]
    """Number of a request -> (its tokens in the step, first element of the mask that it reads)."""

    @staticmethod
    def read(line: str) -> Mask:
        kind, columns, *requests = line.split()[1:]
        parts = (map(int, request.split(":")) for request in requests)
        return Mask(int(kind), int(columns), {number: (rows, first) for number, rows, first in parts})


NO_MASK: Final = 0
ROW_FOR_EACH_TOKEN: Final = 3


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

    def masks(self, index: int) -> list[Mask]:
        """Return the masks that PagedAttention read in a step, one for each plan that was copied to the device."""
        lines = _between(self.trace, f"first {index}", f"end {index}").splitlines()
        return [Mask.read(line) for line in lines if line.startswith("mask ")]

    @property
    def graphs(self) -> list[Counter[str]]:
        """Operations of each graph, by name."""
        found: list[Counter[str]] = []
        for index, node in _NODE.findall(self.output):
            if index == "0":
                found.append(Counter())
            found[-1][node] += 1
        return found

    @property
    def token_graph(self) -> Counter[str]:
        """Operations of the graph of steps whose rows have one token."""
        (graph,) = [graph for graph in self.graphs if "ArgMaxWithValue" in graph]
        return graph

    @property
    def drawing_graphs(self) -> Counter[str]:
        """Operations of the graphs that draw tokens."""
        return sum((graph for graph in self.graphs if "CumsumExt" in graph), Counter())

    @property
    def other_graphs(self) -> Counter[str]:
        others = (graph for graph in self.graphs if not {"ArgMaxWithValue", "CumsumExt"} & set(graph))
        return sum(others, Counter())

    @property
    def internal(self) -> set[str]:
        """Operations with kernels of MindSpore's own library or of ATB, which it contains."""
        return set(_INTERNAL.findall(self.output))

    def ahead(self, kind: str) -> list[tuple[str, list[str]]]:
        """Return the copies and waits of steps that were started ahead: (`start N` or `await N`, lines), in order."""
        events: list[tuple[str, list[str]]] = []
        for line in _between(self.trace, f"ahead {kind} 0", f"ahead {kind} 1").splitlines():
            if line.startswith(f"{MARK} "):
                events.append((line.removeprefix(f"{MARK} "), []))
            elif line.startswith(("copy ", "wait ")):
                events[-1][1].append(line)
        return events[1:]

    @property
    def calls(self) -> list[str]:
        """Calls of operators: `aclnnName ARGUMENT ...`, `atbName ARGUMENT ...` or `aclop Name`, and nodes
        `FlashAttentionScore ARGUMENT ...`.
        """
        nodes = [f"FlashAttentionScore {_arguments(each)}" for each in _ATTENTION.findall(self.output)]
        return nodes + [line for line in self.trace.splitlines() if line.startswith(("acl", "atb"))]


def _arguments(inputs: str) -> str:
    """Return the inputs of a printed node as arguments of a call. Inputs that other nodes compute are 0."""
    found = []
    for each in _INPUT.findall(inputs):
        tensor = re.search(r"Tensor\(shape=\[([\d, ]*)\], dtype=(\w+)", each)
        if tensor is not None:
            found.append(f"{tensor[2].lower()}[{tensor[1].replace(' ', '')}]")
        else:
            found.append(each.split()[-1] if re.match("ValueNode<(Int64|FP32)Imm>", each) else "0")
    return " ".join(found)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    returncode: int
    output: str
    jobs: Mapping[str, Job]
    created: Sequence[str]
    """Names of the files and folders that the process created in its current directory."""


def request(
    name: str,
    module: str,
    arguments: Sequence[Any],
    folder: Path,
    *,
    processors: int = 32,
    gigabytes: int = 64,
    soc: str = "Ascend910B2",
    **invariant: Any,
) -> Request:
    """Return the request for a process in an empty folder, on a machine and device of this size. `invariant`: what
    `cann_stubs.invariant_products` returned.
    """
    home, current = folder / "home", folder / "current"
    home.mkdir()
    current.mkdir()
    environment = {"FAKE_PROCESSORS": str(processors), "FAKE_HBM_GB": str(gigabytes), "FAKE_SOC": soc}
    # Kernels write log files into their folder of logs.
    environment |= {"ASCEND_PROCESS_LOG_PATH": str(home), TRACE: str(folder / "trace.txt")}
    environment |= invariant.get("environment", {})
    output, packages = str(folder / "output.txt"), invariant.get("packages")
    return Request(name, module, arguments, environment, output, str(current), packages)


def run_all(
    cann: Mapping[str, str], requests: Sequence[Request], *, traced: bool = True, timeout_s: float = TIMEOUT_S
) -> Iterator[tuple[Request, int]]:
    """Run processes, two at a time. Yield each one that has ended, and its exit code. Kernels print only if `traced`.

    `cann`: the environment that `cann_stubs.build` returns. Raise RuntimeError if `forks.py` fails.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MS_", "ASCEND_", "FAKE_"))}
    paths = cann["PYTHONPATH"], str(SCRIPT.parents[1]), own.get("PYTHONPATH", "")
    own |= dict(cann) | {"PYTHONPATH": ":".join(filter(None, paths))}
    if traced:
        own |= PRINTING
    else:
        requests = [each.untraced() for each in requests]
    by_name = {each.name: each for each in requests}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        end = threading.Timer(timeout_s, os.killpg, (server.pid, signal.SIGKILL))
        end.start()
        try:
            server.stdin.write(json.dumps(requests))
            server.stdin.close()
            for line in server.stdout:
                name, code = line.rsplit(maxsplit=1)
                yield by_name[name], int(code)
            if server.wait() != 0:
                errors.seek(0)
                raise RuntimeError(f"{SCRIPT.name} ended with {server.returncode}: {errors.read()[-3000:]}")
        finally:
            end.cancel()
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def read(request: Request, code: int) -> Ended:
    """Return what the jobs of an ended process found and printed."""
    output = Path(request.output).read_text(errors="replace")
    trace = request.environment.get(TRACE)
    calls = Path(trace).read_text() if trace is not None and Path(trace).exists() else ""
    by_name = {}
    for each in map(json.loads, results(output)):
        mark = f"load {each['job']}"
        own_calls = _between(calls, mark, None) if calls else ""
        by_name[each["job"]] = Job(each, _between(output, mark, None), own_calls)
    return Ended(code, output, by_name, [each.name for each in Path(request.current).iterdir()])


def requests_of_ranks(folder: Path, model: Path, num_ranks: int) -> list[Request]:
    """Return the requests for the ranks of a replica, each of which runs `rank.py`."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    requests = []
    for rank in range(num_ranks):
        own = folder / str(rank)
        own.mkdir()
        arguments = rank, num_ranks, port, str(model)
        requests.append(request(f"rank {rank}", "rank", arguments, own, processors=16, gigabytes=32))
    return requests


def results(output: str) -> list[str]:
    """Return the lines of JSON that a script wrote after `MARK`."""
    return re.findall(rf"^{MARK}(\{{.*)$", output, re.MULTILINE)


def _between(text: str, first: str, last: str | None) -> str:
    """Return the text between two marks; without `last`, up to the next mark `load`."""
    start = text.index(f"{MARK} {first}\n")
    end = text.find(f"{MARK} load" if last is None else f"{MARK} {last}\n", start + len(MARK))
    return text[start : end if end >= 0 else len(text)]
