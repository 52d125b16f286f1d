"""What runs on a machine of the cluster in place of the master: it starts a WorkAgent there, and ends with it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, Final

import msgspec

from llm_serving.executor.ranks import RankProcesses
from llm_serving.executor.starting import Given, start_processes
from llm_serving.executor.weight_files import WeightFiles, keep, kept

EXIT_S: Final = 5.0
"""In which ranks end when one has."""


class AgentHost:
    """An actor of Ray. It is the parent of a WorkAgent, with all its ranks, and holds the pipes whose ends tell them
    that the parent is gone."""

    def find_weights(self, cache: str, files: bytes) -> str | None:
        """Where this machine keeps the files of a model (`WeightFiles`, as JSON); None: it does not have them."""
        found = kept(cache, msgspec.json.decode(files, type=WeightFiles))
        return None if found is None else str(found)

    def take_weights(self, cache: str, files: bytes, pieces: Sequence[Any]) -> str:
        """Keeps them; `pieces` are references to what Ray has, in a list: otherwise it would bring all at once."""
        return str(keep(cache, msgspec.json.decode(files, type=WeightFiles), _brought(pieces)))

    def run(self, ranks: Sequence[Sequence[str]]) -> str:
        """Runs a WorkAgent to its end, given the arguments of each of its ranks; returns how it ended, as in "code 3".

        The first rank that ends is the end of all.
        """
        # Ray sets it to the cores it was asked for, or to one; the kernels have a number of their own.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        agent = start_processes([Given(arguments) for arguments in ranks], environment)
        processes = agent.ranks if isinstance(agent, RankProcesses) else [agent]
        with ThreadPoolExecutor(len(processes)) as waiting:
            wait([waiting.submit(process.wait) for process in processes], return_when=FIRST_COMPLETED)
            agent.end(EXIT_S)
        return agent.described_end


def _brought(pieces: Sequence[Any]) -> Iterator[memoryview]:
    ray = importlib.import_module("ray")
    for piece in pieces:
        yield memoryview(ray.get(piece))
