"""Fingerprints of the code and of the compute stack (kernels, compiler, MindSpore). Both affect an answer's bits."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import msgspec


class ComputeFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a WorkAgent computes with: kernels, compiler, MindSpore. It reports this after it has loaded its model."""

    kernels: str
    """The kernels in use: program, primitives, plain; ascend, ascend_fast, ascend_invariant or ge."""
    instruction_set: str = ""
    """Instruction set of the C++ kernels, such as avx512_bf16. Empty if they are not used."""
    sources: str = ""
    """Hash of the C++ kernels' sources and flags. Empty if they are not used."""
    compiler: str = ""
    framework: str = ""
    """Version of MindSpore, and of MindFormers if its network is used."""
    ranks: int = 1
    """Number of tensor-parallel ranks. It affects the order of additions."""


UNKNOWN_FINGERPRINT: Final = ComputeFingerprint(kernels="")


_PACKAGE: Final = Path(__file__).resolve().parents[1]
_CODE: Final = (".py", ".cc", ".h")


@cache
def code_fingerprint() -> str:
    """Return the SHA-256 of the package's Python and C++ files. All processes must agree, as answers depend on it."""
    digest = hashlib.sha256()
    for path in sorted(each for each in _PACKAGE.rglob("*") if each.suffix in _CODE):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
