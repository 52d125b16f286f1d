"""Finds or compiles the operator library and the kernels of each instruction set (csrc/).

The library and each set of kernels are files in a cache folder, built once for a version of the sources, a compiler and
its flags. Only the kernels that this CPU needs are built, so several machines may share the folder.

    python -m llm_serving.kernels.compiler          # compiles what is missing; needs only Python's standard library
    python -m llm_serving.kernels.compiler --all    # compiles for all instruction sets, also those of other machines
    python -m llm_serving.kernels.compiler --tests  # compiles for the instruction sets that tests compare on this CPU

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
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from llm_serving.errors import KernelError
from llm_serving.kernels.instruction_sets import INSTRUCTION_SETS, compilable_isas, preferred_isas, runnable_isas
from llm_serving.log import configure_logging, get_logger

logger = get_logger(__name__)

_SOURCES = Path(__file__).parent / "csrc"
_ISA_SOURCES = "*_isa.cc"
_LIBRARY = "libllm_serving"
_OBJECTS = "objects-"
"""Prefix of the folder of a build's object files, in the cache folder."""
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # no implicit fused multiply-add, which would change bits
    "-Wall",
    "-Wextra",
)
_LINKER_FLAGS = ("-shared", "-pthread", "-Wl,-z,defs")
_POLL_S = 0.1
_POLLS_A_LINE = 100
_REPORT_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler and the first line that it prints for `--version`."""

    path: str
    version: str


def find_compiler() -> Compiler:
    configured = os.environ.get("CXX")
    candidates = [configured] if configured else ["g++", "c++", "clang++"]
    path = next((found for name in candidates if (found := shutil.which(name))), None)
    if path is None:
        raise KernelError(f"no C++ compiler found (looked for {', '.join(candidates)}); install g++ or set CXX")
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"the C++ compiler {path} does not run: {error}") from error
    return Compiler(path, version.partition("\n")[0])


Progress = Callable[[str], None]


def library_path(on_progress: Progress | None = None) -> Path:
    """Return the path of the library for these sources. If it or this CPU's kernels are missing, build them first.
    Without a compiler, use an earlier library of the same sources, even if this CPU's kernels are missing.
    """
    try:
        return _built(preferred_isas()[:1], on_progress)[0]
    except KernelError:  # there is no compiler, or it does not know the instructions
        return _built([], on_progress)[0]


def kernels_path(isa: str, on_progress: Progress | None = None) -> Path:
    """Return the path of the kernels of an instruction set, built if missing. Raise the errors of `library_path`."""
    return _built([isa], on_progress)[1]


def _built(isas: Sequence[str], on_progress: Progress | None = None) -> list[Path]:
    parts, folders = [_LIBRARY, *map(_kernels_of, isas)], _cache_folders()
    sources = _fingerprint_of_sources()
    try:
        compiler = find_compiler()
    except KernelError as error:
        return _built_earlier(parts, sources, folders, error)
    suffix = f"{sources}_{_digest(repr(compiler).encode())}"
    found = _find(parts, suffix, folders)  # the file may also be in a read-only folder
    if len(found) < len(parts):
        folder = _writable(folders)
        try:
            with _locked(folder / "build.lock", on_progress or logger.info) as report:
                found = _find(parts, suffix, folders)
                missing = {part: folder / f"{part}_{suffix}.so" for part in parts if part not in found}
                for damaged in filter(os.path.exists, missing.values()):
                    logger.warning("an incomplete file is compiled again: path=%s", damaged)
                if missing:
                    _build(compiler, missing, found.get(_LIBRARY), report)
                found |= missing
        except OSError as error:  # such as a full disk, or a lock file of another user
            remedy = "correct this, or set LLM_SERVING_CACHE to another folder"
            raise KernelError(f"the operator library cannot be built in {folder}: {error}; {remedy}") from error
    return [found[part] for part in parts]


def _kernels_of(isa: str) -> str:
    return f"kernels_{isa}"


def _find(parts: Sequence[str], suffix: str, folders: Sequence[Path]) -> dict[str, Path]:
    paths = {part: [folder / f"{part}_{suffix}.so" for folder in folders] for part in parts}
    return {part: path for part, each in paths.items() if (path := next(filter(_is_complete, each), None)) is not None}


def _is_complete(path: Path) -> bool:
    """Return whether the file has the size that its 64-bit ELF header announces. Linkers write the section headers last
    (elf(5)). If a process loads an incomplete file, SIGBUS may kill it.
    """
    with suppress(OSError, struct.error), path.open("rb") as file:
        magic, offset, size, count = struct.unpack("=4s36xQ10xHH2x", file.read(64))
        return bool(magic == b"\x7fELF" and offset + size * count <= path.stat().st_size)
    return False


def _built_earlier(parts: Sequence[str], sources: str, folders: Sequence[Path], error: KernelError) -> list[Path]:
    """Return earlier builds of all `parts` (library, kernels) from `sources` by any one compiler, or raise `error`."""
    for library in (path for folder in folders for path in sorted(folder.glob(f"{_LIBRARY}_{sources}_*.so"))):
        found = _find(parts, library.stem.removeprefix(f"{_LIBRARY}_"), folders)
        if len(found) == len(parts):
            return [found[part] for part in parts]
    raise error


def _cache_folders() -> list[Path]:
    if configured := os.environ.get("LLM_SERVING_CACHE"):
        return [Path(configured)]
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


def _fingerprint_of_sources() -> str:
    flags = {name: (each.compiler_flags, each.optional_flags) for name, each in INSTRUCTION_SETS.items()}
    parts = [repr((_FLAGS, _LINKER_FLAGS, flags, platform.machine())).encode()]
    for source in sorted(_SOURCES.iterdir()):
        parts += [source.name.encode(), source.read_bytes()]
    return _digest(*parts)


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@contextmanager
def _locked(path: Path, on_progress: Progress) -> Iterator[Progress]:
    """Lock a file. Yield a function that reports progress to the user and to processes that wait for the lock."""
    with path.open("a+") as file:
        started = time.monotonic()
        for attempt in itertools.count():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt % _POLLS_A_LINE == 0:
                    seconds = time.monotonic() - started
                    their_progress = path.read_text() or "compiling the operator library"
                    on_progress(f"waiting for another process, {seconds:.0f} s: {their_progress}")
                time.sleep(_POLL_S)

        def report(text: str) -> None:
            file.truncate(0)
            file.write(text)
            file.flush()
            on_progress(text)

        try:
            yield report
        finally:
            file.truncate(0)


def _build(compiler: Compiler, targets: Mapping[str, Path], library: Path | None, report: Progress) -> None:
    """Compile the sources of `targets` (library or kernel set -> path of the result) in parallel and link them. A file
    appears at its path only when it is complete. `library`: existing library for the kernels, or None if in `targets`.
    """
    started = time.monotonic()
    logger.info("compiling the operator library once: compiler=%s", compiler.version)
    folder = next(iter(targets.values())).parent
    for old in folder.glob(f"{_OBJECTS}*"):  # of a process that was killed
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_OBJECTS, dir=folder) as scratch:
        objects = {part: _objects(compiler, part, Path(scratch)) for part in targets}
        # The kernels take longest to compile, so they start first.
        commands = {name: command for part in sorted(objects) for name, command in objects[part].items()}
        report(f"compiling the operator library, once: {len(commands)} sources, about half a minute")
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            pending = {pool.submit(_run, command): name.stem for name, command in commands.items()}
            try:
                while pending:
                    for task in wait(pending, _REPORT_INTERVAL_S, FIRST_EXCEPTION).done:
                        del pending[task]
                        task.result()
                    done, seconds = f"{len(commands) - len(pending)} of {len(commands)}", time.monotonic() - started
                    left = f"; left: {_some(list(pending.values()))}" if pending else ""
                    report(f"compiling the operator library: {done} sources, {seconds:.0f} s{left}")
            finally:  # after an error or Ctrl-C, no further source is compiled
                pool.shutdown(wait=False, cancel_futures=True)
        for part in sorted(targets, key=_LIBRARY.__ne__):  # the library first: the kernels are linked to it
            linked = Path(scratch) / targets[part].name
            users = [str(library or targets[_LIBRARY])] if part != _LIBRARY else [f"-Wl,-soname,{linked.name}"]
            _run([compiler.path, *_LINKER_FLAGS, "-o", str(linked), *map(str, objects[part]), *users])
            if not _is_complete(linked):
                raise KernelError(f"{compiler.path} wrote the incomplete file {linked}: check the disk")
            with linked.open("rb") as file:
                os.fsync(file.fileno())  # after a power failure, the name must not refer to a file without its data
            linked.replace(targets[part])
    logger.info("compiled the operator library: seconds=%.1f folder=%s", time.monotonic() - started, folder)


def _objects(compiler: Compiler, part: str, folder: Path) -> dict[Path, list[str]]:
    kernels = set(_SOURCES.glob(_ISA_SOURCES))
    flags: list[str] = []
    sources, suffix = set(_SOURCES.glob("*.cc")) - kernels, ""
    if part != _LIBRARY:
        isa = part.removeprefix(_kernels_of(""))
        instructions = INSTRUCTION_SETS[isa]
        accepted = _flags_if_accepted(compiler, instructions.optional_flags)
        flags = [*instructions.compiler_flags, *accepted, f"-DLLM_ISA={isa}"]
        sources, suffix = kernels, f" for {isa}"
    targets = {folder / f"{source.stem}{suffix}.o": source for source in sorted(sources)}
    return {
        target: [compiler.path, *_FLAGS, *flags, "-c", str(source), "-o", str(target)]
        for target, source in targets.items()
    }


def _flags_if_accepted(compiler: Compiler, flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags if the compiler accepts all of them, otherwise none."""
    command = [compiler.path, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return flags if flags and subprocess.run(command, capture_output=True).returncode == 0 else ()  # noqa: S603


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    if finished.returncode != 0:
        raise KernelError(f"`{' '.join(command)}` failed:\n{finished.stderr[-4000:]}")


if __name__ == "__main__":
    configure_logging(process="compiler")
    try:
        option = " ".join(sys.argv[1:])
        _built({"--all": compilable_isas(), "--tests": runnable_isas()}.get(option, preferred_isas()[:1]))
    except KernelError as error:
        sys.exit(f"error: {error}")
