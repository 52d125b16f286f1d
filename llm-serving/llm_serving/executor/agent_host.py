"""What runs on a machine of the cluster in place of the master: it starts a WorkAgent there, and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


class AgentHost:
    """An actor of Ray. It is the parent of the WorkAgent and holds the pipe whose end tells that the parent is gone."""

    def run(self, arguments: Sequence[str]) -> int:
        """Runs a WorkAgent to its end; returns its exit code."""
        command = [sys.executable, "-m", "llm_serving.work_agent", *arguments]
        # Ray sets it to the cores it was asked for, or to one; the kernels have a number of their own.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True) as process:  # noqa: S603
            return process.wait()
