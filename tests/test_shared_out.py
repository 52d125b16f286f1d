"""Tests in several processes: each runs once, and failures and the end of a process are reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
from support import processes
from support.processes import run_in_processes

processes.TIME_LIMIT = 2.0

def pytest_runtestloop(session):
    run_in_processes(session, 2)
    return True
"""
FILES = {
    "test_first.py": """
import os

def test_good(tmp_path):
    print("shown by nobody")

def test_bad():
    print("what it printed")
    assert os.getpid() == os.getppid()
""",
    "test_second.py": """
import os

import pytest

@pytest.mark.skip(reason="too long")
def test_left_out():
    pass

def test_deadly():
    os._exit(7)

def test_behind():
    pass
""",
    "test_crash.py": """
import ctypes

def test_crashing():
    ctypes.string_at(0)
""",
    "test_third.py": """
import pytest

@pytest.fixture
def broken():
    yield
    raise OSError("in the end")

@pytest.mark.parametrize("number", range(3))
def test_many(number, broken):
    pass
""",
    "test_waiting.py": """
import threading

def test_endless():
    threading.Event().wait()
""",
}


def test_distributed_tests_report_every_outcome(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, **FILES}.items():
        (tmp_path / name).write_text(text)
    settings = "-c /dev/null --rootdir . -p no:cacheprovider -p no:hypothesispytest -rfEs -W error".split()
    path = f"pythonpath={Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-o", path, "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert not done.stderr, done.stderr  # such as a file that is not closed
    assert "4 failed, 4 passed, 1 skipped, 3 errors" in done.stdout, done.stdout
    assert "FAILED test_first.py::test_bad - assert" in done.stdout
    assert "what it printed" in done.stdout
    assert "shown by nobody" not in done.stdout
    for name, how in {
        "test_second.py::test_deadly": "exit code 7",
        "test_crash.py::test_crashing": "signal 11",
        "test_waiting.py::test_endless": "exit code 1",
    }.items():
        assert f"FAILED {name} - the process" in done.stdout
        assert f"the process that ran this test has ended ({how})" in done.stdout
    for name in ("test_crashing", "test_endless"):
        assert f"in {name}" in done.stdout, "what its threads executed"
    assert "SKIPPED [1] test_second.py:6: too long" in done.stdout
    assert "OSError: in the end" in done.stdout
