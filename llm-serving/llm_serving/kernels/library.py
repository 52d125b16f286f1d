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
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import KernelError
from llm_serving.kernels.compiler import kernels_path, library_path
from llm_serving.kernels.instruction_sets import ISA_VARIABLE, is_supported, preferred_isas, supported_isas
from llm_serving.log import get_logger

logger = get_logger(__name__)

Callback = ctypes.CFUNCTYPE(None)

_INT, _I64, _F64 = ctypes.c_int, ctypes.c_int64, ctypes.c_double
_POINTER, _TEXT, _I64_POINTER = ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)
_SIGNATURES: Final[dict[str, tuple[Any, list[Any]]]] = {
    "llm_pack_weight": (_INT, [_POINTER, _POINTER, _TEXT, _I64, _I64]),
    "llm_packed_qvalues_bytes": (_I64, [_I64] * 4),
    "llm_pack_qvalues": (
        _INT,
        [_I64, _I64, _POINTER, _POINTER, _POINTER, _I64, _I64, _POINTER, _TEXT, _I64, _I64, _I64],
    ),
    "llm_packed_blocks_bytes": (_I64, [_POINTER, _I64, _I64]),
    "llm_pack_blocks": (_INT, [_I64, _POINTER, _I64, _I64, _POINTER, _TEXT, _I64]),
    "llm_round_to_qvalues": (_INT, [_POINTER, _TEXT, _I64, _I64, _I64, _I64, _I64, _POINTER, _POINTER]),
    "llm_release_weight": (None, [_POINTER]),
    "llm_isa": (_TEXT, []),
    "llm_use_kernels": (None, [_POINTER]),
    "llm_num_threads": (_I64, []),
    "llm_set_num_threads": (None, [_I64]),
    "llm_num_calls": (_I64, []),
    "llm_num_weight_bytes": (_I64, []),
    "llm_last_error": (_TEXT, []),
    "llm_announce_ending": (None, [Callback]),
    "llm_set_profiling": (None, [_INT]),
    "llm_profile": (_TEXT, [_I64, _I64_POINTER, _I64_POINTER]),
    "llm_sample": (_INT, [_POINTER]),
    "llm_sample_args_size": (_I64, []),
    "llm_read_memory": (ctypes.c_uint64, [_POINTER, _I64, _I64]),
    "llm_join_ranks": (_POINTER, [_I64, _I64, _I64, _F64]),
    "llm_error_of_ranks": (_TEXT, [_POINTER]),
    "llm_begin_step": (None, [_POINTER, _I64, _F64]),
    "llm_all_reduce": (None, [_POINTER, _POINTER, _POINTER, _I64, _TEXT]),
    "llm_all_gather": (None, [_POINTER, _POINTER, _I64, _I64]),
    "llm_exchange": (None, [_POINTER, _POINTER, _I64, _POINTER]),
    "llm_leave_ranks": (None, [_POINTER]),
    "llm_use_ranks": (None, [_POINTER]),
    "program": (_INT, [_INT, *[_POINTER] * 6]),
}


def last_error() -> str:
    """Return why the latest operator or library function failed. MindSpore's own error only names the operator."""
    return str(load().llm_last_error().decode())


def done(status: int) -> int:
    """Return the status code of a library function. Raise KernelError for a failure, usually for lack of memory."""
    if status < 0:
        raise KernelError(last_error())
    return status


@functools.cache
def loaded_path() -> Path:
    """Return the path of the library of this process. The first call finds or builds it, as `library_path` does."""
    return library_path()


@functools.cache
def load() -> ctypes.CDLL:
    path = loaded_path()
    library = _open(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    configured = os.environ.get(ISA_VARIABLE)
    if configured and not is_supported(configured):
        logger.warning(
            "%s=%s is not available on this CPU; the library uses the best instruction set", ISA_VARIABLE, configured
        )
    library.llm_use_kernels(_best_kernels())
    isa, num_threads = library.llm_isa().decode(), library.llm_num_threads()
    logger.info("loaded the operator library: isa=%s threads=%d file=%s", isa, num_threads, path.name)
    return library


def _best_kernels() -> int:
    failure = KernelError("the operating system permits none of the instruction sets for which there are kernels")
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
    """Return the address of an instruction set's kernels, or None if the operating system forbids its instructions."""
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
    """Return a context that computes with instruction set `name`, whose kernels are compiled first if they are missing.
    "amx_emulated" (slow) and "avx_vnni_evex" exist for tests, and need AVX-512 VNNI. Raise KernelError if the name is
    unknown, this CPU cannot run it, or its kernels cannot be built.
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
    library = load()
    before = library.llm_num_threads()
    library.llm_set_num_threads(count)
    try:
        yield
    finally:
        library.llm_set_num_threads(before)


class OperatorTime(NamedTuple):
    name: str
    calls: int
    seconds: float


@contextmanager
def profiling() -> Iterator[None]:
    load().llm_set_profiling(1)
    try:
        yield
    finally:
        load().llm_set_profiling(0)


def operator_times() -> list[OperatorTime]:
    """Return the time of each operator within `profiling`, excluding operators that it called, longest first."""
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
    """Call `callback` in a kernel thread when the next step is nearly done. The step waits until the call returns."""
    _listener.callback = callback
    load().llm_announce_ending(_call_listener if callback is not None else Callback())


class _Listener:
    callback: Callable[[], None] | None = None


_listener = _Listener()


@Callback
def _call_listener() -> None:
    if _listener.callback is not None:
        _listener.callback()


_TYPES: Final = {
    np.dtype(name): number
    for number, name in enumerate(("float32", "float16", "uint16", "int32", "int64", "int8"))  # uint16: bfloat16 bits
}
_AXES: Final = ("first", "second", "third", "fourth")


class _Row(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_char_p),  # assigning bytes is several times faster than asking NumPy for an address
        ("type", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        *[(axis, ctypes.c_int64) for axis in _AXES],
    )


_WORDS: Final = ctypes.sizeof(_Row) // ctypes.sizeof(ctypes.c_int64)


class AddressTable:
    """The arrays that an operator call reads and writes, as a table int64 [arrays, 7]: address, type, rank and up to
    four dimensions of each. The C++ class `AddressedCall` reads the table, whose own address never changes.
    """

    def __init__(self, num_parameters: int) -> None:
        table = (_Row * num_parameters)()
        self._rows = list(table)
        words = np.frombuffer(memoryview(table).cast("B"), np.int64)
        self.memory: NDArray[np.int64] = words.reshape(num_parameters, _WORDS)

    def set_copy(self, number: int, array: NDArray[Any]) -> None:
        self._set(number, array.tobytes(), array)

    def set_view(self, number: int, array: NDArray[Any]) -> None:
        """Bind parameter `number` of the call to a C-contiguous array, which the caller must keep alive."""
        self._set(number, array.ctypes.data, array)

    def _set(self, number: int, address: bytes | int, array: NDArray[Any]) -> None:
        row = self._rows[number]
        row.address = address
        row.type = _TYPES[array.dtype]
        row.rank = array.ndim
        for axis, size in zip(_AXES, array.shape, strict=False):
            setattr(row, axis, size)


class ProgramCall:
    """Calls the operator `program` with an AddressTable, and with the other arguments that MindSpore would pass."""

    def __init__(self, table: AddressTable) -> None:
        rows, words = table.memory.shape
        placeholder = ctypes.c_float()  # for the operator's own result; those of the program are in the table's arrays
        data = (ctypes.c_void_p * 2)(table.memory.ctypes.data, ctypes.addressof(placeholder))
        ranks = (ctypes.c_int * 2)(2, 1)
        shapes = (_I64 * 2)(rows, words), (_I64 * 1)(1)
        addresses = (ctypes.c_void_p * 2)(*[ctypes.addressof(each) for each in shapes])
        types = (ctypes.c_char_p * 2)(b"int64", b"float32")
        self._kept_alive = table, placeholder, data, ranks, shapes, addresses, types  # their addresses are passed
        self._arguments = 2, *[ctypes.addressof(each) for each in (data, ranks, addresses, types)], None, None

    def __call__(self) -> None:
        """Run the program. Raise KernelError if it fails."""
        if load().program(*self._arguments):
            raise KernelError(last_error())
