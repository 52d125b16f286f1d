from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from llm_serving.models.weight_reader import Extent, ReadAhead


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    return path


def read_all(read_ahead: ReadAhead) -> int:
    read_ahead._thread.join(30.0)
    assert not read_ahead._thread.is_alive()
    return read_ahead.num_read


def test_read_ahead_reads_everything_within_its_window(file: Path) -> None:
    assert read_all(ReadAhead([Extent(file, 10, 500), Extent(file, 0, 10)])) == 510


def test_read_ahead_waits_until_bytes_are_consumed(file: Path) -> None:
    read_ahead = ReadAhead([Extent(file, 0, 100), Extent(file, 100, 200), Extent(file, 300, 400)], max_ahead=150)
    read_ahead._thread.join(0.01)
    assert read_ahead._thread.is_alive()
    assert read_ahead.num_read <= 300
    read_ahead.consumed(200)
    assert read_all(read_ahead) == 700


def test_read_ahead_stops_on_close(file: Path) -> None:
    read_ahead = ReadAhead([Extent(file, 0, 100), Extent(file, 100, 200)], max_ahead=0)
    read_ahead.close()
    assert read_all(read_ahead) == 0


def test_read_ahead_ignores_a_missing_file(file: Path) -> None:
    assert read_all(ReadAhead([Extent(file.with_name("gone"), 0, 100), Extent(file, 0, 300)])) == 300


@pytest.mark.parametrize("num_sent", [0, 1])
def test_read_ahead_reads_files_that_the_system_cannot_send(
    file: Path, monkeypatch: pytest.MonkeyPatch, num_sent: int
) -> None:
    read, sent, pread = [], [], os.pread

    def fail_to_send(out: int, source: int, offset: int, count: int) -> int:
        sent.append(offset)
        if len(sent) > num_sent:
            raise OSError(errno.EINVAL, "Invalid argument")
        return count

    monkeypatch.setattr(os, "sendfile", fail_to_send)
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: read.append(offset) or pread(fd, count, offset))
    assert read_all(ReadAhead([Extent(file, 10, 500), Extent(file, 600, 10)])) == 510
    assert (sent, read) == ([10, 600], [10, 600][num_sent:])


def test_read_ahead_ends_without_an_error_if_the_null_device_is_missing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "devnull", str(file.with_name("gone") / "null"))
    assert read_all(ReadAhead([Extent(file, 0, 300)])) == 0


def test_read_ahead_ends_behind_the_end_of_a_truncated_file(file: Path) -> None:
    assert read_all(ReadAhead([Extent(file, 900, 1 << 24), Extent(file, 5000, 10)])) == (1 << 24) + 10
