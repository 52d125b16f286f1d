"""Outputs of MindSpore's own operators, from a process without the operator library, which would replace them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

VARIABLE = "LLM_SERVING_TESTS_WITHOUT_LIBRARY"
"""Environment variable that is set in such a process."""


def is_without_library() -> bool:
    """Return whether this is such a process."""
    return VARIABLE in os.environ


def output_of(*arguments: str) -> str:
    """Return the standard output of a Python module in such a process.

    Args:
        arguments: The module and its arguments.

    Raises:
        subprocess.CalledProcessError: The module failed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, env=environment | {VARIABLE: "1"}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def cell_of(arguments: Sequence[str]) -> str:
    """Return the last cell of the table that a module of `families` prints for one model."""
    return output_of(*arguments).strip().rpartition("\n")[2].strip("| ").partition(" | ")[2]
