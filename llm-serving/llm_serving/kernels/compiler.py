"""Find or compile the operator library (csrc/).

The library is built once for a set of sources, a compiler and its flags, and kept in a cache folder. It carries every
instruction set and chooses one when it is loaded, so machines may share the folder.

    python -m llm_serving.kernels.compiler       # compiles it if it is missing; needs Python's standard library alone

Environment:
    CXX: The compiler; otherwise the first of g++, c++ and clang++ that is installed.
    LLM_SERVING_CACHE: The cache folder; otherwise `build` beside this file, or ~/.cache/llm_serving.
"""

from __future__ import annotations

import fcntl
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

from llm_serving.errors import KernelError
from llm_serving.log import configure_logging, get_logger

logger = get_logger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_ISA_SOURCE = "kernels_isa.cc"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # only explicit fused operations: the bits depend on it
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
    # The amx code with its instructions emulated by loops; for tests, so not optimised.
    "amx_emulated": (*_AVX512, "-DLLM_AMX", "-DLLM_AMX_EMULATED", "-O1"),
    # The avx_vnni code with the AVX-512 encoding of its instruction, for tests on CPUs without the VEX encoding.
    "avx_vnni_evex": (*_AVX2, '-DLLM_AVX_VNNI="%{evex%}"', "-O1"),
}


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and what `--version` says of it."""

    path: str
    version: str


def find_compiler() -> Compiler:
    """Return the C++ compiler to build with.

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
"""Called with a text for the user about the state of the compilation."""


def library_path(on_progress: Progress | None = None) -> Path:
    """Return the path of the library for these sources; build it first if it is missing.

    A compiler is needed only once: without one, a library that was built from the same sources is used.

    Args:
        on_progress: Called with the number of compiled sources and the elapsed time. None: the progress is logged.

    Raises:
        KernelError: There is no compiler and no library, no writable folder, or a source does not compile.
    """
    folders = _cache_folders()
    try:
        compiler = find_compiler()
    except KernelError:
        if built := [path for folder in folders for path in _built(folder)]:
            return built[0]
        raise
    name = f"libllm_serving_{_fingerprint_of_sources()}_{_digest(repr(compiler).encode())}.so"
    for folder in folders:  # read-only folders included
        if (path := folder / name) in _built(folder):
            return path
    folder = _writable(folders)
    path = folder / name
    on_progress = on_progress or logger.info
    with _locked(folder / "build.lock", on_progress):
        if not path.exists():
            _build(compiler, path, on_progress)
    return path


def _isas() -> list[str]:
    return list(_ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]


def _cache_folders() -> list[Path]:
    if wanted := os.environ.get("LLM_SERVING_CACHE"):
        return [Path(wanted)]
    folders = [_SOURCES.parent / "build"]
    with suppress(RuntimeError):  # the user may have no home folder
        folders.append(Path.home() / ".cache" / "llm_serving")
    return folders


def _writable(folders: list[Path]) -> Path:
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
    """Return the libraries of these sources, built by any compiler."""
    return sorted(folder.glob(f"libllm_serving_{_fingerprint_of_sources()}_*.so"))


def _fingerprint_of_sources() -> str:
    """Return a hash of everything except the compiler that the library depends on."""
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
    """Hold a lock against other processes; the system releases it if this one dies."""
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
    """Compile the sources in parallel and move the library into place atomically."""
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
    """Return the command of each object file.

    The slowest come first in sort order; objects for every CPU precede the others on the link line.
    """
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


if __name__ == "__main__":
    configure_logging(process="compiler")
    try:
        library_path()
    except KernelError as error:
        sys.exit(f"error: {error}")
