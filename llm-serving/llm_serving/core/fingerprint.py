"""By what a process computes: all that bits of an answer may depend on, besides weights and configuration.

Which code a process runs: a hash over the files of this package.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import msgspec


class ComputeFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


UNKNOWN_FINGERPRINT: Final = ComputeFingerprint(kernels="")


_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CODE: Final = (".py", ".cc", ".h")


@cache
def code_fingerprint() -> str:
    """SHA-256 over path and content of each source file, Python and C++, as it was when this was first asked for.

    Processes of one server must have the same: an answer is a function of the code as well.
    """
    image = hashlib.sha256()
    for path in sorted(each for each in _PACKAGE.rglob("*") if each.suffix in _CODE):
        content = path.read_bytes()
        image.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
        image.update(content)
    return image.hexdigest()
