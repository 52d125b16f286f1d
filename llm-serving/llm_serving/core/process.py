"""Helpers to start processes: commands, exit with the parent, environment of MindSpore, optional packages."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from collections.abc import MutableMapping
from types import ModuleType
from typing import Final

from llm_serving.errors import ConfigError

_PR_SET_PDEATHSIG: Final = 1
DISABLED_KERNELS: Final = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"
"""Environment variable with the names of MindSpore's Ascend kernels that the library ATB replaces."""
NEEDED_ATB_KERNELS: Final = ("FlashAttentionScore", "PagedAttention")
"""Kernels that ATB must replace, because MindSpore's PagedAttention accepts no mask with queries [tokens, hidden]."""
COLLECTIVES: Final = {"MS_ENABLE_LCCL": "off", "HCCL_OP_EXPANSION_MODE": "AIV"}
"""Environment variables with which an NPU runs collectives by HCCL on its vector cores, instead of by LCCL."""
DETERMINISTIC: Final = {
    "HCCL_DETERMINISTIC": "strict",
    "LCCL_DETERMINISTIC": "1",
    "CUSTOM_MATMUL_SHUFFLE": "off",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
    "ATB_LLM_LCOC_ENABLE": "0",
}
"""Environment variables with which an NPU adds in a fixed order. Two of them turn shuffling off, so that each core
starts the sums of a matrix product at the first element."""


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of the package with this Python interpreter.

    `-P` keeps the working directory out of the module search path, because it may contain a file such as `random.py`.
    """
    return [sys.executable, "-Pm", module, *arguments]


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    If that thread has ended before the call, this process keeps running.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_mindspore_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment variables that MindSpore needs on an NPU. Call this before MindSpore is imported.

    Kernels that the operator disabled stay disabled. On a CPU the variables have no effect.
    """
    disabled = [name.strip() for name in environment.get(DISABLED_KERNELS, "").split(",") if name.strip()]
    missing = [name for name in NEEDED_ATB_KERNELS if name not in disabled]
    environment[DISABLED_KERNELS] = ",".join([*disabled, *missing])
    for name, value in COLLECTIVES.items():
        environment.setdefault(name, value)
    # Otherwise ranks that wait for each other log two lines a second.
    environment.setdefault("MS_SUBMODULE_LOG_v", "{DISTRIBUTED:3,DEVICE:3}")


def import_optional(module: str, user: str, remedy: str = "") -> ModuleType:
    """Import a module of the simulator or of the receipts. These packages may not be installed.

    Args:
        module: Full name.
        user: The command or key that needs the module.
        remedy: End of the error message.

    Raises:
        ConfigError: The package is not installed.
        ModuleNotFoundError: The package lacks a dependency.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigError(f"`{user}` needs the package {package}, which is not installed{remedy}") from None
