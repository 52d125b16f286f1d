from __future__ import annotations

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
