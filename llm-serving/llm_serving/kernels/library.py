"""Loads and controls the operator library (csrc/), which MindSpore's operator plugin calls on a CPU.

Environment:
    LLM_SERVING_ISA: Instruction set to use instead of the best one: amx, avx512_bf16, avx512_vnni, avx512, avx_vnni,
        avx2 or plain. Its kernels are compiled if they are missing.
    LLM_SERVING_THREADS: Threads of the kernels, at most as many as the system grants. Default: all that the process may
        use.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from llm_serving.errors import KernelError
from llm_serving.kernels.compiler import kernels_path, library_path
from llm_serving.kernels.instruction_sets import ISA_VARIABLE, is_supported, preferred_isas, supported_isas
from llm_serving.log import get_logger

logger = get_logger(__name__)

Callback = ctypes.CFUNCTYPE(None)


def last_error() -> str:
    """Return why the latest operator or library function failed. MindSpore's own error only names the operator."""
    return str(load().llm_last_error().decode())


def done(status: int) -> int:
    """Return the status of a library function. Raise KernelError if the function failed, usually for lack of memory."""
    if status < 0:
        raise KernelError(last_error())
    return status


@functools.cache
def load() -> ctypes.CDLL:
    """Load the operator library and declare the arguments and results of its functions."""
    path = library_path()
    library = _open(path)
    library.llm_pack_weight.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    library.llm_packed_qvalues_bytes.argtypes = [ctypes.c_int64] * 4
    library.llm_packed_qvalues_bytes.restype = ctypes.c_int64
    library.llm_pack_qvalues.argtypes = [
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        ctypes.c_int64,
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    ]
    library.llm_packed_blocks_bytes.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.llm_packed_blocks_bytes.restype = ctypes.c_int64
    library.llm_pack_blocks.argtypes = [
        *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64),
    ]
    library.llm_round_to_qvalues.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p),
    ]
    library.llm_release_weight.argtypes = [ctypes.c_void_p]
    library.llm_release_weight.restype = None
    library.llm_isa.restype = ctypes.c_char_p
    library.llm_use_kernels.argtypes = [ctypes.c_void_p]
    library.llm_use_kernels.restype = None
    library.llm_num_threads.restype = ctypes.c_int64
    library.llm_set_num_threads.argtypes = [ctypes.c_int64]
    library.llm_set_num_threads.restype = None
    library.llm_num_calls.restype = ctypes.c_int64
    library.llm_num_weight_bytes.restype = ctypes.c_int64
    library.llm_last_error.restype = ctypes.c_char_p
    library.llm_announce_ending.argtypes = [Callback]
    library.llm_announce_ending.restype = None
    library.llm_set_profiling.argtypes = [ctypes.c_int]
    library.llm_set_profiling.restype = None
    library.llm_profile.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)]
    library.llm_profile.restype = ctypes.c_char_p
    library.llm_sample.argtypes = [ctypes.c_void_p]
    library.llm_sample_args_size.restype = ctypes.c_int64
    library.llm_read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.llm_read_memory.restype = ctypes.c_uint64
    library.llm_join_ranks.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]
    library.llm_join_ranks.restype = ctypes.c_void_p
    library.llm_error_of_ranks.argtypes = [ctypes.c_void_p]
    library.llm_error_of_ranks.restype = ctypes.c_char_p
    library.llm_begin_step.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]
    library.llm_all_reduce.argtypes = [*(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_char_p]
    library.llm_all_gather.argtypes = [*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 2]
    library.llm_exchange.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    for function in (library.llm_leave_ranks, library.llm_use_ranks):
        function.argtypes = [ctypes.c_void_p]
    for function in (
        *(library.llm_leave_ranks, library.llm_use_ranks, library.llm_begin_step),
        *(library.llm_all_reduce, library.llm_all_gather, library.llm_exchange),
    ):
        function.restype = None
    configured = os.environ.get(ISA_VARIABLE)
    if configured and not is_supported(configured):
        logger.warning("%s=%s is not available on this CPU; the best instruction set is used", ISA_VARIABLE, configured)
    library.llm_use_kernels(_best_kernels())
    logger.info("kernels: %s, %d threads (%s)", library.llm_isa().decode(), library.llm_num_threads(), path.name)
    return library


def _best_kernels() -> int:
    failure = KernelError("this process may use no instruction set that the kernels are written for")
    for isa in preferred_isas():
        try:
            kernels = _kernels(isa)
        except KernelError as error:
            logger.warning("the kernels for %s are not used: %s", isa, error)
            failure = error
        else:
            if kernels is not None:
                return kernels
    raise failure


@functools.cache
def _kernels(isa: str) -> int | None:
    """Return the address of an instruction set's kernels; None: the operating system does not permit the instruction
    set.

    Load the library before. Raise KernelError if the kernels cannot be built or loaded.
    """
    kernels = _open(kernels_path(isa)).llm_kernels
    kernels.restype = ctypes.c_void_p
    address: int | None = kernels()
    return address


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"the operator library {path} cannot be loaded: {error}") from error


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Return a context that computes with instruction set `name`, whose kernels are compiled first if they are
    missing.

    "amx_emulated" (slow, needs AVX-512) and "avx_vnni_evex" (needs AVX-512 VNNI) exist for tests. Raise KernelError if
    the name is unknown, this CPU cannot run it, or its kernels cannot be built.
    """
    library = load()
    kernels = _kernels(name) if is_supported(name) else None
    if kernels is None:
        raise KernelError(f"the instruction set must be one of {', '.join(supported_isas())}. Given: {name}")
    before = _kernels(library.llm_isa().decode())
    library.llm_use_kernels(kernels)
    try:
        yield
    finally:
        library.llm_use_kernels(before)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Return a context that computes with `count` threads."""
    library = load()
    before = library.llm_num_threads()
    library.llm_set_num_threads(count)
    try:
        yield
    finally:
        library.llm_set_num_threads(before)


class OperatorTime(NamedTuple):
    """Time of one operator since profiling was enabled."""

    name: str
    calls: int
    seconds: float


@contextmanager
def profiling() -> Iterator[None]:
    """Return a context in which the time of every operator is measured, for `operator_times`."""
    load().llm_set_profiling(1)
    try:
        yield
    finally:
        load().llm_set_profiling(0)


def operator_times() -> list[OperatorTime]:
    """Return the time of each operator in the profiled context, longest first, without the operators that it calls."""
    calls, nanoseconds = ctypes.c_int64(), ctypes.c_int64()
    times: dict[str, OperatorTime] = {}
    index = 0
    while (clock := load().llm_profile(index, ctypes.byref(calls), ctypes.byref(nanoseconds))) is not None:
        name = clock.decode()
        before = times.get(name, OperatorTime(name, 0, 0.0))
        times[name] = OperatorTime(name, before.calls + calls.value, before.seconds + nanoseconds.value / 1e9)
        index += 1
    return sorted(times.values(), key=lambda time: time.seconds, reverse=True)


def announce_ending(callback: Callable[[], None] | None) -> None:
    """Call `callback` once, in a thread of the kernels, when the layers of the next program are nearly done.

    The kernels wait until the callback returns. A later call replaces the callback.
    """
    _listener.callback = callback
    load().llm_announce_ending(_call_listener if callback is not None else Callback())


class _Listener:
    callback: Callable[[], None] | None = None


_listener = _Listener()


@Callback
def _call_listener() -> None:
    if _listener.callback is not None:
        _listener.callback()
