"""Subprocesses import nothing from the working directory, and end with their parent."""

import subprocess
import sys
from pathlib import Path

import llm_serving
import psutil
from llm_serving.core.process import command_of


def test_module_command_ignores_modules_in_the_working_directory(tmp_path):
    for name in ("logging.py", "signal.py", "yaml.py"):
        (tmp_path / name).write_text("raise SystemExit('this is not what was meant')\n")
    log = tmp_path / "server.log"
    log.touch()
    command = command_of("llm_serving.log_keeper", str(log), "1048576", "2")
    subprocess.run(command, cwd=tmp_path, input=b"a line\n", check=True, timeout=60)
    assert log.read_text() == "a line\n"


def test_only_core_process_uses_sys_executable():
    package = Path(llm_serving.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if "sys.executable" in path.read_text()] == [
        str(package / "core" / "process.py")
    ]


def test_hanging_process_ends_with_its_parent():
    """In a call that does not let go of the interpreter, so that no thread of its own could notice."""
    child = "import ctypes, os; from llm_serving.core.process import die_with_parent; die_with_parent()"
    child += "; print(os.getpid(), flush=True); ctypes.PyDLL(None).pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        hanging = psutil.Process(int(process.stdout.readline()))
        process.kill()
    assert not psutil.wait_procs([hanging], timeout=60)[1]
