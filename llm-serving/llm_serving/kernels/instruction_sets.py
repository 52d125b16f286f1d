"""The instruction sets of the kernels and of this CPU. This module may import only Python's standard library."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Final, NamedTuple

ISA_VARIABLE: Final = "LLM_SERVING_ISA"
PLAIN: Final = "plain"


class InstructionSet(NamedTuple):
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    is_for_tests: bool = False
    optional_flags: tuple[str, ...] = ()
    """Flags that are left out if the compiler does not accept all of them."""


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
# g++ 12 and later accept these flags. Without them, g++ copies structs of AVX2 vectors in halves of 16 bytes. A load of
# 32 bytes from such a copy stalls, because a CPU forwards a store to a load only if one store has all of its bytes.
_AVX2_WIDE_COPIES = ("-mmove-max=256", "-mstore-max=256")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_HAS_VNNI = _HAS_AVX512 | {"avx512_vnni"}
_HAS_BF16 = _HAS_VNNI | {"avx512_bf16"}
INSTRUCTION_SETS: Final = {
    "amx": InstructionSet(
        (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-DLLM_AMX"), _HAS_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
    ),
    "avx512_bf16": InstructionSet(_AVX512_BF16, _HAS_BF16),
    "avx512_vnni": InstructionSet((*_AVX512, "-mavx512vnni"), _HAS_VNNI),
    "avx512": InstructionSet(_AVX512, _HAS_AVX512),
    "avx_vnni": InstructionSet(
        (*_AVX2, "-mavxvnni", '-DLLM_AVX_VNNI="%{vex%}"'), _HAS_AVX2 | {"avx_vnni"}, optional_flags=_AVX2_WIDE_COPIES
    ),
    "avx2": InstructionSet(_AVX2, _HAS_AVX2, optional_flags=_AVX2_WIDE_COPIES),
    PLAIN: InstructionSet((), frozenset()),
    # The amx kernels with loops that emulate the AMX instructions, compiled without full optimisation.
    "amx_emulated": InstructionSet(
        (*_AVX512, "-mavx512vnni", "-DLLM_AMX", "-DLLM_AMX_EMULATED", "-O1"), _HAS_VNNI, True
    ),
    # The avx_vnni kernels with the AVX-512 encoding of their instruction, for CPUs without the VEX encoding.
    "avx_vnni_evex": InstructionSet((*_AVX2, '-DLLM_AVX_VNNI="%{evex%}"', "-O1"), _HAS_VNNI, True),
}


def compilable_isas() -> list[str]:
    return list(INSTRUCTION_SETS) if platform.machine() in ("x86_64", "AMD64") else [PLAIN]


def supported_isas() -> list[str]:
    """Return the instruction sets that this CPU runs, best first. Those that exist only for tests are left out."""
    return [name for name in runnable_isas() if not INSTRUCTION_SETS[name].is_for_tests]


def runnable_isas() -> list[str]:
    """Return the instruction sets that this CPU runs, best first, then those that exist only for tests."""
    return [name for name in compilable_isas() if is_supported(name)]


def is_supported(name: str) -> bool:
    return name in compilable_isas() and INSTRUCTION_SETS[name].cpu_flags <= _cpu_flags()


def preferred_isas() -> list[str]:
    """Return the instruction sets to try: the one in `LLM_SERVING_ISA` if this CPU runs it, then others, best first."""
    configured = os.environ.get(ISA_VARIABLE, "")
    first = [configured] if is_supported(configured) else []
    return [*first, *(name for name in supported_isas() if name not in first)]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
