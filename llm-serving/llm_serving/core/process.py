"""Commands of subprocesses of this package, and their end with the parent."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2)."""


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package with this Python interpreter.

    `-P` keeps the working directory out of the module search path, where a file such as `random.py` would be imported.
    """
    return [sys.executable, "-Pm", module, *arguments]


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, even if this process hangs or is stopped.

    If the parent has ended before the call, this process lives on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
