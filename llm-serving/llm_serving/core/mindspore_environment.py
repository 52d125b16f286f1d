"""Environment variables that MindSpore must find when it is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

DISABLED_KERNELS: Final = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"
"""Names of MindSpore's own Ascend kernels that are not used, separated by commas; ATB's kernels take their place."""

NEEDED_ATB_KERNELS: Final = ("FlashAttentionScore", "PagedAttention")
"""MindSpore's own PagedAttention takes no mask with queries of two dimensions, [tokens, hidden], which a step has."""


def set_mindspore_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what a process that serves needs. Call it before the first import of MindSpore.

    Kernels that the operator disabled stay disabled. On a CPU the variables have no effect.

    Args:
        environment: The variables to change.
    """
    disabled = [name.strip() for name in environment.get(DISABLED_KERNELS, "").split(",") if name.strip()]
    missing = [name for name in NEEDED_ATB_KERNELS if name not in disabled]
    environment[DISABLED_KERNELS] = ",".join([*disabled, *missing])
    # Without this, ranks that wait for each other log a line twice a second.
    environment.setdefault("MS_SUBMODULE_LOG_v", "{DISTRIBUTED:3,DEVICE:3}")
