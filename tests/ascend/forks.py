"""Imports MindSpore once, and forks the processes that run on the stubs of CANN: `python forks.py < REQUESTS`.

REQUESTS is a list of lists with the fields of `Request`. Prints a line `NAME CODE` when a process has ended; CODE is 0
if it succeeded. Run it in the environment that `cann_stubs.build` returns.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llm_serving.core.process import DISABLED_KERNELS, set_mindspore_environment

TRACE = "FAKE_TRACE"
"""Environment variable with the file to which the stubs write calls and copies."""
PARALLEL = 2
"""Number of processes that run at a time."""


class Request(NamedTuple):
    """A process to fork."""

    name: str
    module: str
    """Module of this package whose `main` the process calls: `device` or `rank`."""
    arguments: Sequence[Any]
    environment: Mapping[str, str]
    output: str
    """The file of its output."""
    current: str
    """The process's current directory, which is empty."""
    packages: str | None = None
    """A folder with further packages."""

    def untraced(self) -> Request:
        return self._replace(environment={name: value for name, value in self.environment.items() if name != TRACE})


def main() -> None:
    requests = [Request(*fields) for fields in json.load(sys.stdin)]
    os.environ.pop(DISABLED_KERNELS, None)
    set_mindspore_environment()
    importlib.import_module("ascend.device").freeze_modules()
    running: dict[int, str] = {}
    while requests or running:
        while requests and len(running) < PARALLEL:
            request = requests.pop(0)
            process = os.fork()
            if process == 0:
                _run(request)
            running[process] = request.name
        process, status = os.wait()
        sys.stdout.write(f"{running.pop(process)} {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(request: Request) -> None:
    """Call `main` of the module, and end this process."""
    status = 1
    try:
        os.environ.update(request.environment)
        sys.path[:0] = [] if request.packages is None else [request.packages]
        output = os.open(request.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(request.current)
        importlib.import_module(f"ascend.{request.module}").main(*request.arguments)
        status = 0
    except Exception:  # noqa: BLE001  the fork must not return to `main`
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(status)


if __name__ == "__main__":
    main()
