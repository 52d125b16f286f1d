"""What MindSpore's own operators answer: in a process of its own, since one that has the operator library uses that."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

VARIABLE = "LLM_SERVING_TESTS_WITHOUT_LIBRARY"
"""Of the environment: set where MindSpore's own operators are asked."""


def is_without_library() -> bool:
    """Whether this is such a process."""
    return VARIABLE in os.environ


def output_of(*arguments: str) -> str:
    """What a Python module prints in such a process.

    Args:
        arguments: `-m`'s, of an interpreter.

    Raises:
        subprocess.CalledProcessError: It fails.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, env=environment | {VARIABLE: "1"}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def cell_of(arguments: Sequence[str]) -> str:
    """The last cell of the table that a module of `families` prints of one model."""
    return output_of(*arguments).strip().rpartition("\n")[2].strip("| ").partition(" | ")[2]
