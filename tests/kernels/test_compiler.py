import fcntl
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llm_serving.errors import KernelError
from llm_serving.kernels import compiler as build
from llm_serving.kernels.instruction_sets import (
    INSTRUCTION_SETS,
    compilable_isas,
    is_supported,
    preferred_isas,
    runnable_isas,
    supported_isas,
)

# A fake compiler: writes the header of an ELF file to the requested output file and appends its arguments to the file
# `calls` beside itself. It accepts every option, but no optional flags if the file `old` is beside it.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake compiler 1.0"; exit 0; fi
case "$*" in *-fsyntax-only*) if [ -e "$(dirname "$0")/old" ]; then exit 1; else exit 0; fi;; esac
echo "$@" >> "$(dirname "$0")/calls"
while [ "$1" != -o ]; do shift; done
{ printf '\\177ELF'; head -c 60 /dev/zero; } > "$2"
"""
OBJECT = b"\x7fELF" + bytes(60)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text(FAKE_COMPILER)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("LLM_SERVING_CACHE", str(tmp_path / "cache"))
    return path


def calls(compiler: Path) -> list[str]:
    return (compiler.parent / "calls").read_text().splitlines()


def test_library_is_compiled_once_and_then_reused(compiler: Path) -> None:
    path = build.library_path()
    kernels = build.kernels_path(preferred_isas()[0])
    assert path.parent == kernels.parent == compiler.parent / "cache"
    assert path.read_bytes() == kernels.read_bytes() == OBJECT
    num_calls = len(calls(compiler))
    assert build.library_path() == path
    assert len(calls(compiler)) == num_calls
    assert {each.name for each in path.parent.iterdir()} == {"build.lock", path.name, kernels.name}


@pytest.mark.parametrize("part", ["libllm_serving", "kernels_"])
def test_an_incomplete_file_is_compiled_again(compiler: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    library = build.library_path()
    (path,) = library.parent.glob(f"{part}*.so")
    (compiler.parent / "calls").unlink()
    os.truncate(path, 63)
    assert build.library_path() == library
    assert path.read_bytes() == OBJECT
    assert [line.count(path.name) for line in calls(compiler) if "-shared" in line] == [2 if path == library else 1]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage() == f"an incomplete file is compiled again: path={path}"


def test_build_removes_the_object_files_of_a_killed_process(compiler: Path) -> None:
    left = compiler.parent / "cache" / "objects-x"
    left.mkdir(parents=True)
    (left / "kernels.o").write_bytes(OBJECT)
    build.library_path()
    assert not left.exists()


def test_built_files_are_on_the_disk_before_they_get_their_names(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    library = build.library_path()
    kernels = build.kernels_path(preferred_isas()[0])
    assert synced == [library.stat().st_ino, kernels.stat().st_ino]


def test_build_fails_if_the_compiler_writes_an_incomplete_file(compiler: Path) -> None:
    compiler.write_text(FAKE_COMPILER.replace("head -c 60", "head -c 59"))
    with pytest.raises(KernelError, match=r"wrote the incomplete file .*/libllm_serving_.*: check the disk"):
        build.library_path()
    assert not list((compiler.parent / "cache").glob("*.so"))


def test_a_compiled_library_without_its_last_byte_is_incomplete(tmp_path: Path) -> None:
    try:
        content = build.library_path().read_bytes()
    except KernelError as error:
        pytest.skip(str(error))
    path = tmp_path / "library.so"
    for size in (0, 64, len(content) - 1, len(content)):
        path.write_bytes(content[:size])
        assert build._is_complete(path) == (size == len(content))


@pytest.mark.skipif("avx2" not in compilable_isas(), reason="needs x86")
def test_optional_flags_are_given_only_to_a_compiler_that_knows_them(compiler: Path) -> None:
    build.kernels_path("avx2")
    (compiler.parent / "old").touch()
    build.kernels_path("avx_vnni")
    assert isas_of([call for call in calls(compiler) if "-mmove-max=256" in call]) == ["avx2"]
    assert isas_of(calls(compiler)) == ["avx2", "avx_vnni"]


def isas_of(lines: list[str]) -> list[str]:
    words = [word for line in lines for word in line.split() if word.startswith("-DLLM_ISA=")]
    return [word.removeprefix("-DLLM_ISA=") for word in words]


def test_library_is_compiled_with_the_kernels_of_one_instruction_set(compiler: Path) -> None:
    library = build.library_path()
    *compiled, linked_library, linked_kernels = calls(compiler)
    sources = {path.name for path in (Path(build.__file__).parent / "csrc").glob("*.cc")}
    assert sorted(sources) == sorted(
        Path(word).name for line in compiled for word in line.split() if word[-3:] == ".cc"
    )
    assert isas_of(compiled) == preferred_isas()[:1]
    assert f"-soname,{library.name}" in linked_library and "kernels_isa" not in linked_library
    assert linked_library.count(".o ") == len(sources) - 1
    assert "kernels_isa" in linked_kernels and linked_kernels.endswith(str(library))


def test_kernels_of_another_instruction_set_are_compiled_on_request(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.library_path()
    (compiler.parent / "calls").unlink()
    other = supported_isas()[-1]
    kernels = build.kernels_path(other)
    compiled, linked = calls(compiler)
    assert isas_of([compiled]) == [other] == ["plain"]
    assert linked.endswith(str(library))
    assert kernels.exists() and other in kernels.name
    monkeypatch.setenv("LLM_SERVING_ISA", other)
    assert build.library_path() == library
    assert len(calls(compiler)) == 2


def test_environment_names_the_instruction_set_that_is_compiled_first(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_SERVING_ISA", "plain")
    build.library_path()
    assert isas_of(calls(compiler)) == ["plain"]


def test_an_unknown_instruction_set_in_the_environment_is_ignored(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_SERVING_ISA", "sse9")
    build.library_path()
    assert isas_of(calls(compiler)) == supported_isas()[:1]


def test_all_instruction_sets_are_compiled_by_the_command(compiler: Path) -> None:
    command = [sys.executable, "-S", "-m", "llm_serving.kernels.compiler", "--all"]
    subprocess.run(command, cwd=Path(build.__file__).parents[2], capture_output=True, timeout=60, check=True)
    assert sorted(isas_of(calls(compiler))) == sorted(compilable_isas())
    assert len(list((compiler.parent / "cache").glob("kernels_*.so"))) == len(compilable_isas())


def test_instruction_sets_of_this_cpu_are_compiled_by_the_command(compiler: Path) -> None:
    command = [sys.executable, "-S", "-m", "llm_serving.kernels.compiler", "--tests"]
    subprocess.run(command, cwd=Path(build.__file__).parents[2], capture_output=True, timeout=60, check=True)
    assert sorted(isas_of(calls(compiler))) == sorted(runnable_isas())


@pytest.mark.parametrize("isa", [each for each in compilable_isas() if not is_supported(each)])
def test_kernels_that_this_cpu_cannot_run_have_no_errors_and_warnings(isa: str, tmp_path: Path) -> None:
    try:
        path = build.find_compiler().path
    except KernelError as error:
        pytest.skip(str(error))
    for source in build._SOURCES.glob(build._ISA_SOURCES):
        flags = [*build._FLAGS, *INSTRUCTION_SETS[isa].compiler_flags, f"-DLLM_ISA={isa}", "-Werror"]
        checked = subprocess.run([path, *flags, "-fsyntax-only", str(source)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def test_library_is_compiled_anew_for_another_compiler_version(compiler: Path) -> None:
    first = build.library_path()
    compiler.write_text(FAKE_COMPILER.replace("1.0", "2.0"))
    assert build.library_path() != first


def test_library_of_the_same_sources_is_used_without_a_compiler(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build.library_path()
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    assert build.library_path() == built
    monkeypatch.setenv("LLM_SERVING_ISA", "plain")
    assert build.library_path() == built, "its kernels were built for another instruction set"
    with pytest.raises(KernelError, match="no C\\+\\+ compiler found"):
        build.kernels_path("amx_emulated")
    built.unlink()
    with pytest.raises(KernelError, match="no C\\+\\+ compiler found"):
        build.library_path()


def test_library_is_compiled_once_by_concurrent_processes(compiler: Path) -> None:
    program = "from llm_serving.kernels import compiler as build; print(build.library_path())"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0] for process in started}
    assert len(paths) == 1
    assert sum("-shared" in line for line in calls(compiler)) == 2, "library and kernels"


def test_process_logs_that_it_waits_for_another_compilation(compiler: Path) -> None:
    folder = compiler.parent / "cache"
    folder.mkdir()
    logger = logging.getLogger("llm_serving")
    waits = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage() and "12 of 34 sources" in record.getMessage():
                waits.set()

    watch = Watch()
    logger.addHandler(watch)
    logger.setLevel(logging.INFO)
    try:
        # The lock ends before the pool, which would wait for ever for it if an assertion failed.
        with ThreadPoolExecutor(1) as pool, (folder / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write("12 of 34 sources")
            lock.flush()
            path = pool.submit(build.library_path)
            assert waits.wait(60)
            assert not path.done()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert path.result(60).exists()
    finally:
        logger.removeHandler(watch)
        logger.setLevel(logging.NOTSET)


def test_compiler_module_runs_as_a_command_without_site_packages(compiler: Path) -> None:
    """scripts/setup.sh runs it while packages are being installed."""
    source = Path(build.__file__).parents[2]
    command = [sys.executable, "-S", "-m", "llm_serving.kernels.compiler"]
    finished = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=True)
    assert len(list((compiler.parent / "cache").glob("*.so"))) == 2, finished.stderr
    assert "compiled the operator library: seconds=" in finished.stderr


def test_compilation_progress_is_logged_by_default(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llm_serving")
    build.library_path()
    assert "compiling the operator library once: compiler=fake compiler 1.0" in caplog.text
    assert "compiled the operator library: seconds=" in caplog.text


def test_compilation_progress_is_passed_to_the_callback(compiler: Path) -> None:
    reported: list[str] = []
    build.library_path(reported.append)
    num_sources = len(calls(compiler)) - 2  # the last calls link
    first, *steps = reported
    assert first.startswith(f"compiling the operator library, once: {num_sources} sources")
    texts = [line.partition(",")[0] for line in steps]
    of_all = [f"compiling the operator library: {done} of {num_sources} sources" for done in range(1, num_sources + 1)]
    assert texts == [text for text in of_all if text in texts]
    assert texts[-1] == of_all[-1]
    reported.clear()
    build.library_path(reported.append)
    assert reported == []


def test_find_compiler_names_the_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    with pytest.raises(
        KernelError, match="no C\\+\\+ compiler found \\(looked for /nowhere/compiler\\); install g\\+\\+"
    ):
        build.find_compiler()


def test_compilation_error_contains_the_compiler_output(compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo x && exit 0\necho "no such header" >&2\nexit 1\n')
    with pytest.raises(KernelError, match="no such header"):
        build.library_path()
    assert not list((compiler.parent / "cache").glob("*.so"))
    assert (compiler.parent / "cache" / "build.lock").read_text() == ""


def test_no_further_source_is_compiled_after_an_error(compiler: Path) -> None:
    failing = '"$@" >> "$(dirname "$0")/calls"\nsleep 0.2; exit 1'
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo x && exit 0\necho {failing}\n')
    with pytest.raises(KernelError, match="failed"):
        build._built([])
    num_sources = len(list(build._SOURCES.glob("*.cc")))
    assert len(calls(compiler)) <= max(2 * len(os.sched_getaffinity(0)), num_sources // 2)


@pytest.mark.parametrize("has_compiler", [False, True])
def test_library_in_a_read_only_folder_is_used(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    built = build.library_path()
    if not has_compiler:
        monkeypatch.setenv("CXX", "/nowhere/compiler")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert build.library_path() == built


def test_cache_folders_omit_a_home_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LLM_SERVING_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(no_home))
    assert build._cache_folders() == [Path(build.__file__).parent / "build"]


@pytest.mark.parametrize("name", ["compiler/below_a_file", "x" * 300])  # the second is too long for a file name
def test_library_path_fails_without_a_writable_folder(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("LLM_SERVING_CACHE", str(compiler.parent / name))
    with pytest.raises(KernelError, match="set LLM_SERVING_CACHE"):
        build.library_path()


def test_library_path_names_the_lock_file_that_cannot_be_opened(compiler: Path) -> None:
    lock = compiler.parent / "cache" / "build.lock"
    lock.mkdir(parents=True)
    with pytest.raises(KernelError, match=f"cannot be built in {lock.parent}: .*{lock}"):
        build.library_path()
