"""By what a process computes: all that bits of an answer may depend on, besides weights and configuration."""

from __future__ import annotations

from typing import Final

import msgspec


class ComputedBy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Told by a WorkAgent when it has loaded its model."""

    kernels: str
    """What `device_config.kernels` came to: program, primitives, plain; ascend, ascend_fast, ascend_invariant or ge."""
    instruction_set: str = ""
    """That of the operator library, such as avx512_bf16; empty where it does not compute."""
    sources: str = ""
    """Names the library's sources and flags; empty where it does not compute."""
    compiler: str = ""
    """Names what compiled the library."""
    framework: str = ""
    """MindSpore's version, and MindFormers' where its network computes."""
    ranks: int = 1
    """Processes that computed it together: sums are added in another order than by one."""


NOT_KNOWN: Final = ComputedBy(kernels="")
