"""Environment variables that must be set before MindSpore is imported."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Final

DISABLED_KERNELS: Final = "MS_INTERNAL_DISABLE_CUSTOM_KERNEL_LIST"
"""Comma-separated names of MindSpore's own Ascend kernels that ATB's kernels replace."""

NEEDED_ATB_KERNELS: Final = ("FlashAttentionScore", "PagedAttention")
"""MindSpore's own PagedAttention accepts no mask with two-dimensional queries, [tokens, hidden], which a step has."""


def set_mindspore_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that a serving process needs, before the first import of MindSpore.

    Kernels that the operator disabled stay disabled. On a CPU the variables have no effect.

    Args:
        environment: The variables to change.
    """
    disabled = [name.strip() for name in environment.get(DISABLED_KERNELS, "").split(",") if name.strip()]
    missing = [name for name in NEEDED_ATB_KERNELS if name not in disabled]
    environment[DISABLED_KERNELS] = ",".join([*disabled, *missing])
    # Otherwise ranks that wait for each other log two lines a second.
    environment.setdefault("MS_SUBMODULE_LOG_v", "{DISTRIBUTED:3,DEVICE:3}")
