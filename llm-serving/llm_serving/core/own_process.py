"""How a process of this package is started beside another one."""

from __future__ import annotations

import sys


def command_of(module: str, *arguments: str) -> list[str]:
    """Runs a module of the package with the interpreter of this process.

    The folder the command is given in is no place for modules, as it would be with `-m` alone: a `random.py` that lies
    there is not ours.
    """
    return [sys.executable, "-Pm", module, *arguments]
