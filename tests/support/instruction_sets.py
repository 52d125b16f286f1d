"""The instruction sets for tests of the kernels, found without the library, which may still be compiling."""

import platform
from contextlib import suppress
from pathlib import Path

from llm_serving.errors import KernelError
from llm_serving.kernels.compiler import find_compiler, library_path

EMULATED = "amx_emulated"
"""The code of amx with its instructions emulated by loops."""
EVEX = "avx_vnni_evex"
"""The code of avx_vnni with its instruction in the AVX-512 encoding."""

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_NEEDED = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512 | {"avx512_bf16"},
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512": _AVX512,
    "avx_vnni": _AVX2 | {"avx_vnni"},
    "avx2": _AVX2,
}
"""Flags of /proc/cpuinfo that each instruction set needs, best set first."""


def real_isas() -> list[str]:
    """Return the library's instruction sets that this CPU supports, best first; none if the library cannot exist."""
    if not _there_can_be_a_library():
        return []
    return [*(isa for isa, needed in _NEEDED.items() if needed <= _cpu_flags()), "plain"]


def isas() -> list[str]:
    """Return `real_isas` and the emulated set."""
    real = real_isas()
    return [*real, *([EMULATED] if "avx512" in real else [])]


def isas_of_qvalues() -> list[str]:
    """Return the instruction sets that differ in the multiplication of 8-bit quantized values."""
    return [*isas(), *([EVEX] if "avx512_vnni" in real_isas() else [])]


def _there_can_be_a_library() -> bool:
    for find in (find_compiler, library_path):  # without a compiler, a library that was built earlier is used
        with suppress(KernelError):
            find()
            return True
    return False


def _cpu_flags() -> frozenset[str]:
    if platform.machine() != "x86_64":
        return frozenset()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next(line for line in lines if line.startswith("flags")).split())
