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
from llm_serving.kernels import library
from support.instruction_sets import real_isas

# Stands for a compiler: writes what it was asked for, and a line into a log beside itself.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake compiler 1.0"; exit 0; fi
echo "$@" >> "$(dirname "$0")/calls"
while [ "$1" != -o ]; do shift; done
echo object > "$2"
"""


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


def test_library_is_compiled_once_and_found_again(compiler: Path) -> None:
    path = library.library_path()
    assert path.parent == compiler.parent / "cache"
    assert path.read_text() == "object\n"
    num_calls = len(calls(compiler))
    assert library.library_path() == path
    assert len(calls(compiler)) == num_calls
    assert [entry.name for entry in path.parent.iterdir() if entry.name != "build.lock"] == [path.name]


def test_every_source_and_instruction_set_is_compiled_and_linked(compiler: Path) -> None:
    library.library_path()
    *compiled, linked = calls(compiler)
    sources = {path.name for path in (Path(library.__file__).parent / "csrc").glob("*.cc")} - {"kernels_isa.cc"}
    assert {Path(word).name for line in compiled for word in line.split() if word.endswith(".cc")} == {
        *sources,
        "kernels_isa.cc",
    }
    isas = {
        word.removeprefix("-DLLM_ISA=") for line in compiled for word in line.split() if word.startswith("-DLLM_ISA")
    }
    assert "plain" in isas
    objects = [Path(word).name for word in linked.split() if word.endswith(".o")]
    assert len(objects) == len(compiled) == len(sources) + len(isas)
    # The linker keeps the first of equal functions: those any CPU can run.
    assert all(name.startswith("isa_") for name in objects[-len(isas) :])


def test_another_compiler_makes_another_library(compiler: Path) -> None:
    first = library.library_path()
    compiler.write_text(FAKE_COMPILER.replace("1.0", "2.0"))
    assert library.library_path() != first


def test_without_a_compiler_a_library_of_the_same_sources_serves(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library.library_path()
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    assert library.library_path() == built
    built.unlink()
    with pytest.raises(KernelError, match="no C\\+\\+ compiler found"):
        library.library_path()


def test_processes_that_start_together_compile_once(compiler: Path) -> None:
    program = "from llm_serving.kernels import library; print(library.library_path())"
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0] for process in started}
    assert len(paths) == 1
    assert sum("-shared" in line for line in calls(compiler)) == 1


def test_a_process_that_waits_for_another_to_compile_says_so(compiler: Path) -> None:
    folder = compiler.parent / "cache"
    folder.mkdir()
    logger = logging.getLogger("llm_serving")
    waits = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waiting" in record.getMessage():
                waits.set()

    watch = Watch()
    logger.addHandler(watch)
    logger.setLevel(logging.INFO)
    try:
        with (folder / "build.lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = pool.submit(library.library_path)
            assert waits.wait(60)
            assert not path.done()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert path.result(60).exists()
    finally:
        logger.removeHandler(watch)
        logger.setLevel(logging.NOTSET)


def test_the_module_is_a_command_that_compiles(compiler: Path) -> None:
    """With nothing installed: scripts/setup.sh runs it while packages are being installed."""
    source = Path(library.__file__).parents[2]
    command = [sys.executable, "-S", "-m", "llm_serving.kernels.library"]
    finished = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=60, check=True)
    assert len(list((compiler.parent / "cache").glob("*.so"))) == 1, finished.stderr
    assert "compiled the operator library in" in finished.stderr


def test_the_tests_go_through_every_instruction_set_of_this_cpu() -> None:
    assert real_isas() == library.supported_isas()


def test_progress_is_logged(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llm_serving")
    library.library_path()
    assert "compiling the operator library with fake compiler 1.0" in caplog.text
    assert "compiled the operator library in" in caplog.text


def test_whoever_wants_to_know_is_told_how_far_the_compiler_is(compiler: Path) -> None:
    told: list[str] = []
    library.library_path(told.append)
    num_sources = len(calls(compiler)) - 1  # the last call links
    first, *steps = told
    assert first.startswith(f"compiling the operator library, once: {num_sources} sources")
    texts = [line.partition(",")[0] for line in steps]
    of_all = [f"compiling the operator library: {done} of {num_sources} sources" for done in range(1, num_sources + 1)]
    assert texts == [text for text in of_all if text in texts]
    assert texts[-1] == of_all[-1]
    told.clear()
    library.library_path(told.append)
    assert told == []


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/compiler")
    with pytest.raises(
        KernelError, match="no C\\+\\+ compiler found \\(looked for /nowhere/compiler\\); install g\\+\\+"
    ):
        library.find_compiler()


def test_a_compiler_that_fails_shows_why(compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo x && exit 0\necho "no such header" >&2\nexit 1\n')
    with pytest.raises(KernelError, match="no such header"):
        library.library_path()
    assert not list((compiler.parent / "cache").glob("*.so"))


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_library_where_nobody_may_write_serves(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool
) -> None:
    built = library.library_path()
    if not has_compiler:
        monkeypatch.setenv("CXX", "/nowhere/compiler")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert library.library_path() == built


def test_who_has_no_home_folder_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LLM_SERVING_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(nobody))
    assert library._cache_folders() == [Path(library.__file__).parent / "build"]


def test_without_a_folder_to_write_to(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_SERVING_CACHE", str(compiler / "below_a_file"))
    with pytest.raises(KernelError, match="set LLM_SERVING_CACHE"):
        library.library_path()


def test_an_unknown_instruction_set_lists_the_known_ones() -> None:
    with pytest.raises(KernelError, match=r"must be one of .*plain\. Given: sse9"), library.isa_in_use("sse9"):
        pass


@pytest.mark.parametrize("isa", ["plain"])
def test_environment_chooses_instruction_set_and_threads(isa: str) -> None:
    program = "from llm_serving.kernels import library; k = library.load(); print(k.llm_isa(), k.llm_num_threads())"
    finished = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"LLM_SERVING_ISA": isa, "LLM_SERVING_THREADS": "3", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
    )
    assert finished.stdout.split() == [str(isa.encode()), "3"], finished.stderr
