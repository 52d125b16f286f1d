"""What runs on a machine of the cluster in place of the master: it starts a WorkAgent there, and ends with it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from llm_serving.executor.weight_files import WeightFiles, keep, kept


class AgentHost:
    """An actor of Ray. It is the parent of the WorkAgent and holds the pipe whose end tells that the parent is gone."""

    def find_weights(self, cache: str, files: bytes) -> str | None:
        """Where this machine keeps the files of a model (`WeightFiles`, as JSON); None: it does not have them."""
        found = kept(cache, msgspec.json.decode(files, type=WeightFiles))
        return None if found is None else str(found)

    def take_weights(self, cache: str, files: bytes, pieces: Sequence[Any]) -> str:
        """Keeps them; `pieces` are references to what Ray has, in a list: otherwise it would bring all at once."""
        return str(keep(cache, msgspec.json.decode(files, type=WeightFiles), _brought(pieces)))

    def run(self, arguments: Sequence[str]) -> int:
        """Runs a WorkAgent to its end; returns its exit code."""
        command = [sys.executable, "-m", "llm_serving.work_agent", *arguments]
        # Ray sets it to the cores it was asked for, or to one; the kernels have a number of their own.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True) as process:  # noqa: S603
            return process.wait()


def _brought(pieces: Sequence[Any]) -> Iterator[memoryview]:
    ray = importlib.import_module("ray")
    for piece in pieces:
        yield memoryview(ray.get(piece))
