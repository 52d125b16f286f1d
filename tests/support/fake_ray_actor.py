"""A fake of Ray actors on this machine: each actor is a process of its own, which is killed as an actor is.

Run as `python FILE PYTHON RANKS` this file is the actor: RANKS are the arguments of each rank as JSON, and PYTHON is
the interpreter of the ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from llm_serving.executor.cluster.ray_process import AgentHost
from llm_serving.executor.worker_process import LocalProcess


class ActorStarter:
    """Starts actors as `RayStarter` does."""

    def __init__(self, secret_file: Path, python: str = sys.executable) -> None:
        self.secret_file, self._python = secret_file, python
        self.actors: list[LocalProcess] = []
        """All started actors, the newest last."""

    def start(self, index: int, ranks: Sequence[Sequence[str]]) -> LocalProcess:
        given = [[*arguments, "--secret-file", str(self.secret_file)] for arguments in ranks]
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self.actors.append(
            LocalProcess(
                [sys.executable, __file__, self._python, json.dumps(given)],
                stdin=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )
        )
        return self.actors[-1]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the newest actor, in order of rank."""
        return sorted(psutil.Process(self.actors[-1].pid).children(), key=_rank)

    def close(self) -> None:
        for actor in self.actors:
            actor.kill()
            actor.communicate()


def _rank(process: psutil.Process) -> int:
    command = process.cmdline()
    return int(command[command.index("--rank") + 1])


if __name__ == "__main__":
    sys.executable = sys.argv[1]
    sys.exit(AgentHost().run(json.loads(sys.argv[2])))
