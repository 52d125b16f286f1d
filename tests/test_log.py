from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

import pytest
from llm_serving import log
from llm_serving.log import LogWriter, RotatingFile, SingleLineFormatter


def printed(text: str, error: BaseException | None = None) -> str:
    trace = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("llm_serving.x", logging.INFO, "x.py", 1, "of %s", (text,), trace)
    return SingleLineFormatter("%(levelname)s %(name)s: %(message)s").format(record)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ann\n2026-01-01 ERROR [master] x: lost", r"ann\n2026-01-01 ERROR [master] x: lost"),
        ("a\r\x1b[2J\x9b1m\u2028b\x85", r"a\r\x1b[2J\x9b1m\u2028b\x85"),
        ("\ud800", r"\ud800"),
        ("Zürich 東京 😀 \\n", "Zürich 東京 😀 \\n"),
    ],
)
def test_control_characters_in_a_log_line_are_escaped(text, shown):
    assert printed(text) == f"INFO llm_serving.x: of {shown}"


def test_a_traceback_keeps_its_line_breaks():
    try:
        raise ValueError("why")
    except ValueError:
        lines = printed("it", sys.exc_info()[1]).split("\n")
    assert (lines[0], lines[1]) == ("INFO llm_serving.x: of it", "Traceback (most recent call last):")
    assert lines[-1] == "ValueError: why"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(log, "BATCH_S", 0.0)
    monkeypatch.setattr(log, "RETRY_S", 0.0)


class Disk(logging.Handler):
    """A handler that can be full or block; `calls` counts its writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.is_full = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.calls = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.gate.wait()
        is_full = self.is_full  # a caller that waits for this call may change it at once
        self.calls.release()
        if is_full:
            raise OSError(28, "No space left on device")
        self.lines += record.getMessage().split("\n")


class Messages(list[str]):
    """Messages of the writer; each `wait` returns the next one."""

    def __init__(self) -> None:
        super().__init__()
        self._available = threading.Semaphore(0)
        self._num_read = 0

    def say(self, text: str) -> None:
        self.append(text)
        self._available.release()

    def wait(self) -> str:
        self._available.acquire()
        self._num_read += 1
        return self[self._num_read - 1]


def test_log_writer_keeps_the_order_of_each_thread():
    disk = Disk()
    writer = LogWriter(disk, pytest.fail)
    threads = [
        threading.Thread(target=lambda name=name: [writer.put(f"{name}{i}") for i in range(500)]) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    for name in "ab":
        assert [line for line in disk.lines if line[0] == name] == [f"{name}{i}" for i in range(500)]


def test_rotating_file_deletes_the_oldest_file(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "BATCH_CHARS", 1)
    writer = LogWriter(RotatingFile(tmp_path / "a.log", max_bytes=100, num_files=3), pytest.fail)
    lines = [f"line {i:02}" for i in range(60)]  # 8 bytes each, 12 in a file
    for line in lines:
        writer.put(line)
    writer.close()
    names = ["a.log.2", "a.log.1", "a.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    kept = [line for name in names for line in (tmp_path / name).read_text().splitlines()]
    assert kept == lines[-len(kept) :]
    assert all((tmp_path / name).stat().st_size <= 100 for name in names)
    assert len(kept) > 24


def test_log_writer_reopens_a_renamed_file(tmp_path):
    path, moved = tmp_path / "a.log", tmp_path / "moved.log"
    file = RotatingFile(path, max_bytes=10_000, num_files=2)
    written = threading.Semaphore(0)
    emit = file.emit
    file.emit = lambda record: (emit(record), written.release())
    writer = LogWriter(file, pytest.fail)
    for line in ("one", "two", "three"):
        if line == "two":
            path.rename(moved)
        if line == "three":
            writer.reopen()
        writer.put(line)
        written.acquire()
    writer.close()
    assert moved.read_text().split() == ["one", "two"]
    assert path.read_text().split() == ["three"]


def test_log_writer_reports_a_full_disk_once_and_retries():
    disk, messages = Disk(), Messages()
    writer = LogWriter(disk, messages.say)
    disk.is_full = True
    writer.put("lost")
    assert messages.wait() == "cannot be written, lines are dropped until it can: [Errno 28] No space left on device"
    disk.calls.acquire()
    writer.put("lost too")
    disk.calls.acquire()
    disk.is_full = False
    writer.put("kept")
    assert messages.wait() == "is written again; 2 lines were lost"
    writer.close()
    assert disk.lines == ["kept"]
    assert len(messages) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_log_writer_survives_a_full_device():
    messages = Messages()
    writer = LogWriter(RotatingFile(Path("/dev/full"), 2**20, 2), messages.say)
    writer.put("lost")
    assert "No space left on device" in messages.wait()
    writer.put("lost")
    writer.close()
    assert len(messages) == 1


def test_log_writer_bounds_its_memory_while_the_disk_hangs(monkeypatch):
    monkeypatch.setattr(log, "MAX_PENDING_BYTES", 10 * sys.getsizeof("another line"))
    monkeypatch.setattr(log, "CLOSE_S", 0.0)
    disk, messages = Disk(), Messages()
    disk.gate.clear()
    writer = LogWriter(disk, messages.say)
    writer.put("first")
    disk.entered.wait()
    for _ in range(1000):
        writer.put("another line")
    writer.close()  # returns although the disk hangs
    disk.gate.set()
    assert messages.wait() == "is written too slowly, lines are dropped"
    assert messages.wait() == "is written again; 990 lines were lost"
    assert len(disk.lines) == 11
