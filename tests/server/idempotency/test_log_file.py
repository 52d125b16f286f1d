"""The log of accepted requests: complete records are read again after any crash."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from pathlib import Path

import pytest
from llm_serving.errors import ConfigError
from llm_serving.server.idempotency import store
from llm_serving.server.idempotency.store import LogFile
from support.accepted_records import record


def opened(folder: Path, max_bytes: int = 2**20) -> tuple[LogFile, list[str]]:
    log = LogFile(folder, max_bytes)
    return log, [each.stream_id for each in log.read()]


def write(log: LogFile, *numbers: int, **fields) -> None:
    async def run():
        for number in numbers:
            await log.append(record(number, **fields))

    asyncio.run(run())


def streams(*numbers: int) -> list[str]:
    return [f"stream-{number}" for number in numbers]


def test_request_log_is_read_in_order(tmp_path):
    log, found = opened(tmp_path / "log")
    assert found == []
    write(log, 1, 2)
    log.close()
    log, found = opened(tmp_path / "log")
    assert found == streams(1, 2)
    write(log, 3)
    log.close()
    log, found = opened(tmp_path / "log")
    assert found == streams(1, 2, 3)
    log.close()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "log").iterdir()} == {0o600}


def test_request_log_record_round_trip(tmp_path):
    log, _ = opened(tmp_path)
    write(log, 1, seed=2**64 - 1, request=b'{"prompt": "\xc3\xa9"}')
    log.close()
    log = LogFile(tmp_path, 2**20)
    assert list(log.read()) == [record(1, seed=2**64 - 1, request=b'{"prompt": "\xc3\xa9"}')]
    log.close()


def test_request_log_folder_is_locked(tmp_path):
    log, _ = opened(tmp_path)
    with pytest.raises(ConfigError, match="is used by another server"):
        LogFile(tmp_path, 2**20)
    log.close()
    LogFile(tmp_path, 2**20).close()


def test_request_log_refuses_an_unusable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="request_log_path"):
        LogFile(tmp_path / "file", 2**20)


def test_request_log_loses_only_a_torn_record(tmp_path):
    log, _ = opened(tmp_path)
    write(log, 1)
    one = (tmp_path / "requests-0.log").read_bytes()
    write(log, 2)
    log.close()
    whole = (tmp_path / "requests-0.log").read_bytes()
    for length in range(len(one), len(whole)):
        (tmp_path / "requests-0.log").write_bytes(whole[:length])
        log, found = opened(tmp_path)
        assert found == streams(1)
        log.close()
    write_after, _ = opened(tmp_path)
    write(write_after, 3)
    write_after.close()
    log, found = opened(tmp_path)
    assert found == streams(1, 3), "the torn one was cut off"
    log.close()


def test_request_log_file_ends_at_a_damaged_record(tmp_path):
    log, _ = opened(tmp_path)
    write(log, 1, 2)
    log.close()
    file = tmp_path / "requests-0.log"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    log, found = opened(tmp_path)
    assert found == streams(1)
    log.close()


def test_request_log_keeps_an_unreadable_file(tmp_path, monkeypatch, caplog):
    log, _ = opened(tmp_path)
    write(log, 0, 1)
    log.close()
    kept = (tmp_path / "requests-0.log").read_bytes()

    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        log, found = opened(tmp_path)
    assert (found, "requests-0.log: cannot be read" in caplog.text) == ([], True)
    write(log, 2)
    log.close()
    assert (tmp_path / "requests-0.log").read_bytes() == kept
    log, found = opened(tmp_path)
    log.close()
    assert found == streams(0, 1, 2)


def test_request_log_deletes_the_oldest_files(tmp_path):
    log, _ = opened(tmp_path, max_bytes=8000)
    for number in range(100):
        write(log, number, request=b"x" * 500)
        assert sum(path.stat().st_size for path in tmp_path.glob("requests-*")) <= 8000
    write(log, 100, request=b"x" * 3000)
    log.close()
    log, found = opened(tmp_path, max_bytes=8000)
    assert found[-1] == "stream-99", "what is too long is not written"
    assert found == streams(*range(100 - len(found), 100))
    assert len(found) >= 4
    log.close()


def test_request_log_stops_on_a_full_disk(tmp_path, monkeypatch, caplog):
    log, _ = opened(tmp_path)
    write(log, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "write", full)
    with caplog.at_level(logging.ERROR):
        write(log, 2, 3)
        monkeypatch.undo()
        write(log, 4)
    assert [line.getMessage().partition(": ")[2] for line in caplog.records] == [
        "no more requests are logged until the server restarts: No space left on device"
    ]
    log.close()
    log, found = opened(tmp_path)
    assert found == streams(1)
    log.close()


def test_request_log_on_a_hanging_disk_uses_bounded_memory(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store, "WAIT_S", 0.001)
    log, _ = opened(tmp_path)
    size = len(store._encode(record(1)))
    monkeypatch.setattr(store, "MAX_WAITING_BYTES", 5 * size)
    hangs, write_now, waited = threading.Event(), log._write, []

    def write_late(content):
        hangs.wait()
        write_now(content)

    async def wait(*args, **kwargs):
        waited.append(args)
        return await asyncio_wait(*args, **kwargs)

    asyncio_wait = asyncio.wait
    monkeypatch.setattr(store.asyncio, "wait", wait)
    monkeypatch.setattr(log, "_write", write_late)

    async def run():
        for number in range(9):
            await log.append(record(number))
        assert log._num_waiting_bytes == 5 * size
        hangs.set()
        while log._num_waiting_bytes:
            await asyncio.sleep(0)
        await log.append(record(9))

    asyncio.run(run())
    log.close()
    assert len(waited) == 2, "for the first, and when it was over"
    assert [line.getMessage().partition(": ")[2] for line in caplog.records] == [
        "the disk is too slow; new requests are not logged until it has written the waiting records",
        "logging of requests has resumed; lost_records=4",
    ]
    log, found = opened(tmp_path)
    assert found == streams(0, 1, 2, 3, 4, 9)
    log.close()


def test_request_log_ignores_other_files(tmp_path):
    log, _ = opened(tmp_path)
    write(log, 1)
    log.close()
    content = (tmp_path / "requests-0.log").read_bytes()
    copies = [tmp_path / name for name in ("requests-1.bak.log", "requests-2 (copy).log", "requests-007.log")]
    for path in copies:
        path.write_bytes(content)
    log, found = opened(tmp_path)
    write(log, 2)
    log.close()
    assert found == streams(1)
    assert all(path.read_bytes() == content for path in copies)
