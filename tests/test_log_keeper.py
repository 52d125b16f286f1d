"""The process that writes the output of background servers to log files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from llm_serving_tools.log_keeper import READ_BYTES, read_lines


def lines_of(*chunks: bytes) -> list[str]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
    with os.fdopen(reading):
        return list(read_lines(reading))


def test_read_lines_reassembles_split_lines():
    assert lines_of(b"one\ntw", b"o\n\nthr", b"ee") == ["one", "two", "", "three"]


def test_read_lines_escapes_invalid_utf_8():
    assert lines_of(b"\xff ok\n") == ["\\xff ok"]


def test_read_lines_splits_an_endless_line(monkeypatch):
    chunks = [b"x" * READ_BYTES, b"y" * READ_BYTES, b"z\n", b""]
    monkeypatch.setattr(os, "read", lambda fd, size: chunks.pop(0))
    assert list(map(len, read_lines(0))) == [READ_BYTES, READ_BYTES, 1]


def keeper(path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "llm_serving_tools.log_keeper", str(path), str(2**20), "2"]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_log_keeper_ignores_signals_and_exits_with_the_last_writer(tmp_path, number):
    path = tmp_path / "server.log"
    with keeper(path) as process:
        process.stdin.write(b"before\n")
        process.stdin.flush()
        while not path.exists() or not path.read_text():
            assert process.poll() is None
            os.sched_yield()
        process.send_signal(number)
        process.stdin.write(b"after\n")
        process.stdin.close()
        assert process.wait(30) == 0
    assert path.read_text() == "before\nafter\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_log_keeper_keeps_reading_while_the_disk_is_full():
    with keeper(Path("/dev/full")) as process:
        for _ in range(100):
            process.stdin.write(b"x" * 2**16 + b"\n")  # more than a pipe holds
        process.stdin.close()
        assert process.wait(30) == 0
