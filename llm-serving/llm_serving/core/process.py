"""How a process of this package is started beside another one, and ends with it."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""Of `prctl` (2)."""


def command_of(module: str, *arguments: str) -> list[str]:
    """Runs a module of the package with the interpreter of this process.

    The folder the command is given in is no place for modules, as it would be with `-m` alone: a `random.py` that lies
    there is not ours.
    """
    return [sys.executable, "-Pm", module, *arguments]


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, even if it hangs then or is stopped. One
    whose parent ended before that is not killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
