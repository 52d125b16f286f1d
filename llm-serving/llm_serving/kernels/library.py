"""Find, build and load the operator library (csrc/) that MindSpore's operator plugin calls on a CPU.

The library is built once for a set of sources, a compiler and its flags, and kept in a cache folder. It carries every
instruction set and chooses when it is loaded, so the folder may be shared between machines.

    python -m llm_serving.kernels.library       # builds it if it is not there; needs no package but Python's own

Environment:
    CXX: The compiler; otherwise g++, c++ or clang++, whichever is found first.
    LLM_SERVING_CACHE: The cache folder; otherwise `build` beside this file, or ~/.cache/llm_serving.
    LLM_SERVING_ISA: Instruction set to use in place of the best one: amx, avx512_bf16, avx512_vnni, avx512,
        avx_vnni, avx2 or plain.
    LLM_SERVING_THREADS: Threads of the kernels; otherwise as many as the process may use. Fewer where the system gives
        no more.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llm_serving.errors import KernelError
from llm_serving.log import configure_logging, get_logger

logger = get_logger(__name__)

Callback = ctypes.CFUNCTYPE(None)
"""A function that the library calls."""

_SOURCES = Path(__file__).parent / "csrc"
_ISA_SOURCE = "kernels_isa.cc"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # products are fused where the source says so, nowhere else: bits depend on it
    "-Wall",
    "-Wextra",
)
_POLL_S = 0.1
_POLLS_A_LINE = 100
_LONGEST_SILENCE_S = 10.0
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vnni")
_ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-DLLM_AMX"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx_vnni": (*_AVX2, "-mavxvnni", '-DLLM_AVX_VNNI="%{vex%}"'),
    "avx2": _AVX2,
    "plain": (),
    # The code of amx with loops for its instructions: for tests, hence not worth optimising.
    "amx_emulated": (*_AVX512, "-DLLM_AMX", "-DLLM_AMX_EMULATED", "-O1"),
    # The code of avx_vnni with its instruction as AVX-512 encodes it, for tests on CPUs that have that one alone.
    "avx_vnni_evex": (*_AVX2, '-DLLM_AVX_VNNI="%{evex%}"', "-O1"),
}


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and what `--version` says of it."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """The C++ compiler to build with.

    Raises:
        KernelError: There is none, or it does not run.
    """
    wanted = os.environ.get("CXX")
    candidates = [wanted] if wanted else ["g++", "c++", "clang++"]
    path = next((found for name in candidates if (found := shutil.which(name))), None)
    if path is None:
        raise KernelError(f"no C++ compiler found (looked for {', '.join(candidates)}); install g++ or set CXX")
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"the C++ compiler {path} does not run: {error}") from error
    return Compiler(path, version.partition("\n")[0])


Progress = Callable[[str], None]
"""Told what is being done, for people."""


def library_path(on_progress: Progress | None = None) -> Path:
    """Path of the library for these sources; built first if it is not there.

    A compiler is needed once: without one, a library that was built from the same sources serves.

    Args:
        on_progress: Told how far the compiler is, and for how long it has been at it, once a source is done. None:
            the log has it.

    Raises:
        KernelError: No compiler and no library, no folder to write to, or a source does not compile.
    """
    folders = _cache_folders()
    try:
        compiler = find_compiler()
    except KernelError:
        if built := [path for folder in folders for path in _built(folder)]:
            return built[0]
        raise
    name = f"libllm_serving_{_fingerprint_of_sources()}_{_digest(repr(compiler).encode())}.so"
    for folder in folders:  # also where nobody may write
        if (path := folder / name) in _built(folder):
            return path
    folder = _writable(folders)
    path = folder / name
    on_progress = on_progress or logger.info
    with _locked(folder / "build.lock", on_progress):
        if not path.exists():
            _build(compiler, path, on_progress)
    return path


def last_error() -> str:
    """Why the latest operator or function that failed did so: MindSpore's own error names the operator only."""
    return str(load().llm_last_error().decode())


def done(status: int) -> int:
    """What a function of the library returned, unless it threw on its way.

    Raises:
        KernelError: It did, most likely for lack of memory.
    """
    if status < 0:
        raise KernelError(last_error())
    return status


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded into this process, with its functions declared.

    Raises:
        KernelError: It cannot be built or loaded.
    """
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"the operator library {path} cannot be loaded: {error}") from error
    library.llm_pack_weight.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int64,
        ctypes.c_int64,
    ]
    library.llm_packed_codes_bytes.argtypes = [ctypes.c_int64] * 4
    library.llm_packed_codes_bytes.restype = ctypes.c_int64
    library.llm_pack_codes.argtypes = [
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
    ]
    library.llm_round_to_codes.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ]
    library.llm_release_weight.argtypes = [ctypes.c_void_p]
    library.llm_release_weight.restype = None
    library.llm_isa.restype = ctypes.c_char_p
    library.llm_supported_isa.argtypes = [ctypes.c_int64]
    library.llm_supported_isa.restype = ctypes.c_char_p
    library.llm_select_isa.argtypes = [ctypes.c_char_p]
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
    logger.info("kernels: %s, %d threads (%s)", library.llm_isa().decode(), library.llm_num_threads(), path.name)
    return library


def supported_isas() -> list[str]:
    """Instruction sets of the library that this CPU runs, best first."""
    library = load()
    names: list[str] = []
    while (name := library.llm_supported_isa(len(names))) is not None:
        names.append(name.decode())
    return names


@contextmanager
def isa_in_use(name: str) -> Iterator[None]:
    """Compute with another instruction set for a while; also "amx_emulated", slow, on CPUs with AVX-512, and
    "avx_vnni_evex" on those with its VNNI.

    Raises:
        KernelError: The name is unknown or this CPU cannot run it.
    """
    library = load()
    before = library.llm_isa()
    if library.llm_select_isa(name.encode()) != 0:
        raise KernelError(f"the instruction set must be one of {', '.join(supported_isas())}. Given: {name}")
    try:
        yield
    finally:
        library.llm_select_isa(before)


@contextmanager
def threads_in_use(count: int) -> Iterator[None]:
    """Compute with another number of threads for a while."""
    library = load()
    before = library.llm_num_threads()
    library.llm_set_num_threads(count)
    try:
        yield
    finally:
        library.llm_set_num_threads(before)


class OperatorTime(NamedTuple):
    """What one operator took since profiling was switched on."""

    name: str
    calls: int
    seconds: float


@contextmanager
def profiling() -> Iterator[None]:
    """Counts the time of every operator called inside; `operator_times` tells it, also afterwards."""
    load().llm_set_profiling(1)
    try:
        yield
    finally:
        load().llm_set_profiling(0)


def operator_times() -> list[OperatorTime]:
    """Every operator that was called, the longest first; an operator inside another counts as itself only."""
    calls, nanoseconds = ctypes.c_int64(), ctypes.c_int64()
    times: dict[str, OperatorTime] = {}
    index = 0
    while (clock := load().llm_profile(index, ctypes.byref(calls), ctypes.byref(nanoseconds))) is not None:
        name = clock.decode()
        before = times.get(name, OperatorTime(name, 0, 0.0))
        times[name] = OperatorTime(name, before.calls + calls.value, before.seconds + nanoseconds.value / 1e9)
        index += 1
    return sorted(times.values(), key=lambda time: time.seconds, reverse=True)


def _isas() -> list[str]:
    return list(_ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]


def _cache_folders() -> list[Path]:
    """Where a library may be, the best first."""
    if wanted := os.environ.get("LLM_SERVING_CACHE"):
        return [Path(wanted)]
    folders = [_SOURCES.parent / "build"]
    with suppress(RuntimeError):  # whoever runs this may have no home
        folders.append(Path.home() / ".cache" / "llm_serving")
    return folders


def _writable(folders: list[Path]) -> Path:
    """The first folder that can be written."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise KernelError(
        f"no folder to keep the operator library in (tried {', '.join(map(str, folders))}); set LLM_SERVING_CACHE"
    )


def _built(folder: Path) -> list[Path]:
    """Libraries of these sources, of any compiler."""
    return sorted(folder.glob(f"libllm_serving_{_fingerprint_of_sources()}_*.so"))


def _fingerprint_of_sources() -> str:
    """Names everything but the compiler that the library follows from."""
    parts = [repr((_FLAGS, _ISA_FLAGS, platform.machine())).encode()]
    for source in sorted(_SOURCES.iterdir()):
        parts += [source.name.encode(), source.read_bytes()]
    return _digest(*parts)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path, on_progress: Progress) -> Iterator[None]:
    """Hold a lock that other processes respect; the system drops it if this one dies."""
    with path.open("w") as file:
        started = time.monotonic()
        for attempt in itertools.count():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt % _POLLS_A_LINE == 0:
                    seconds = time.monotonic() - started
                    on_progress(f"waiting for another process that compiles the operator library: {seconds:.0f} s")
                time.sleep(_POLL_S)
        yield


def _build(compiler: Compiler, path: Path, on_progress: Progress) -> None:
    """Compile the sources side by side and put the library in place in one step."""
    started = time.monotonic()
    logger.info("compiling the operator library with %s (once; about half a minute)", compiler.version)
    num_sources = len(_compile_commands(compiler, path.parent))
    on_progress(f"compiling the operator library, once: {num_sources} sources, about a minute")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        commands = _compile_commands(compiler, Path(scratch))
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            tasks = [pool.submit(_run, command) for command in commands.values()]
            pending = set(tasks)
            while pending:
                done, pending = wait(pending, _LONGEST_SILENCE_S, FIRST_COMPLETED)
                for task in done:
                    task.result()
                seconds, num_done = time.monotonic() - started, num_sources - len(pending)
                on_progress(f"compiling the operator library: {num_done} of {num_sources} sources, {seconds:.0f} s")
        linked = Path(scratch) / path.name
        _run([compiler.path, "-shared", "-o", str(linked), *map(str, commands), "-pthread"])
        linked.replace(path)
    logger.info("compiled the operator library in %.1f s: %s", time.monotonic() - started, path)


def _compile_commands(compiler: Compiler, folder: Path) -> dict[Path, list[str]]:
    """Object file -> command; the slowest first, those for every CPU foremost on the link line."""
    commands: dict[Path, list[str]] = {}
    for source in sorted(_SOURCES.glob("*.cc")):
        if source.name != _ISA_SOURCE:
            target = folder / f"{source.stem}.o"
            commands[target] = [compiler.path, *_FLAGS, "-c", str(source), "-o", str(target)]
    for isa in _isas():
        target = folder / f"isa_{isa}.o"
        flags = (*_FLAGS, *_ISA_FLAGS[isa], f"-DLLM_ISA={isa}")
        commands[target] = [compiler.path, *flags, "-c", str(_SOURCES / _ISA_SOURCE), "-o", str(target)]
    return commands


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if finished.returncode != 0:
        raise KernelError(f"`{' '.join(command)}` failed:\n{finished.stderr[-4000:]}")


def announce_ending(tell: Callable[[], None] | None) -> None:
    """Has `tell` called, once, when the layers of the next program are nearly done, in place of what was given before.

    It is called by a thread of the operators, which computes on when it returns.
    """
    _listener.tell = tell
    load().llm_announce_ending(_ending_is_near if tell is not None else Callback())


class _Listener:
    tell: Callable[[], None] | None = None


_listener = _Listener()


@Callback
def _ending_is_near() -> None:
    if _listener.tell is not None:
        _listener.tell()


if __name__ == "__main__":
    configure_logging(process="compiler")
    try:
        library_path()
    except KernelError as error:
        sys.exit(f"error: {error}")
