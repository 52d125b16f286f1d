"""The instruction sets for tests of the kernels, found without the library, which may still be compiling."""

from contextlib import suppress
from functools import cache

from llm_serving.errors import KernelError
from llm_serving.kernels.compiler import find_compiler, library_path
from llm_serving.kernels.instruction_sets import is_supported, supported_isas

EMULATED = "amx_emulated"
"""The code of amx with its instructions emulated by loops."""
EVEX = "avx_vnni_evex"
"""The code of avx_vnni with its instruction in the AVX-512 encoding."""


def real_isas() -> list[str]:
    """Return the instruction sets that this CPU supports, best first; none if the library cannot exist."""
    return supported_isas() if _there_can_be_a_library() else []


def isas() -> list[str]:
    """Return `real_isas` and the emulated set."""
    real = real_isas()
    return [*real, *([EMULATED] if real and is_supported(EMULATED) else [])]


def isas_of_qvalues() -> list[str]:
    """Return the instruction sets that differ in the multiplication of 8-bit quantized values."""
    return [*isas(), *([EVEX] if real_isas() and is_supported(EVEX) else [])]


@cache  # files of tests ask dozens of times when they are collected
def _there_can_be_a_library() -> bool:
    for find in (find_compiler, library_path):  # without a compiler, a library that was built earlier is used
        with suppress(KernelError):
            find()
            return True
    return False
