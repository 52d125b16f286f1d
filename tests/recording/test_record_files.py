"""Recording files: numbering, deletion of the oldest, and errors of the disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from llm_serving.recording import record_files
from llm_serving.recording.record_files import RecordFiles
from llm_serving.recording.recorder import RecordedScheduler, Recorder
from support.factories import create_request, create_scheduler, run_step
from support.recordings import replay, seal


def create_recorded(files: RecordFiles, max_file_bytes: int = 2**24) -> tuple[RecordedScheduler, Recorder]:
    plain = create_scheduler(max_num_seqs=2)
    recorder = Recorder(files, "replica-0", max_file_bytes)
    return RecordedScheduler(plain._components.rules, plain.blocks, recorder), recorder


def run_load(scheduler: RecordedScheduler) -> None:
    for _ in range(6):
        scheduler.add(create_request(9))
    while scheduler.has_unfinished_requests:
        run_step(scheduler)


def test_record_file_has_the_records_and_the_log_its_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scheduler, recorder = create_recorded(RecordFiles(tmp_path / "made" / "here", "replica-0", 4))
    run_load(scheduler)
    recorder.close()
    (path,) = (tmp_path / "made" / "here").iterdir()
    assert path.name == "replica-0-000001.rec"
    assert path.stat().st_mode & 0o777 == 0o600
    replayed = replay(path.read_bytes())
    assert caplog.messages[-1].endswith(
        f"events={replayed.num_events} decisions={replayed.num_decisions} hash={replayed.hash}"
    )


def test_record_files_rotate_and_delete_the_oldest(tmp_path: Path) -> None:
    (tmp_path / "replica-0-000041.rec").write_bytes(b"of an earlier run")
    (tmp_path / "replica-1-000050.rec").write_bytes(b"of another scheduler")
    (tmp_path / "replica-0-notes.txt").write_bytes(b"of somebody else")
    scheduler, recorder = create_recorded(RecordFiles(tmp_path, "replica-0", 3), max_file_bytes=1)
    for _ in range(12):
        run_load(scheduler)
    recorder.close()
    numbers = sorted(int(path.stem[-6:]) for path in tmp_path.glob("replica-0-*.rec"))
    assert len(numbers) == 3
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert numbers[0] > 41
    assert (tmp_path / "replica-1-000050.rec").exists() and (tmp_path / "replica-0-notes.txt").exists()
    files = [(tmp_path / f"replica-0-{number:06}.rec").read_bytes() for number in numbers]
    assert [replay(data).hash for data in files] == [seal(data) for data in files]
    headers = [replay(data)._reader.header for data in files]
    assert [header.seal.hex() for header in headers[1:]] == [seal(data) for data in files[:-1]]


def test_full_disk_stops_the_recording_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    class FullDisk:
        def write(self, data: Any) -> int:
            failed.set()
            raise OSError(28, os.strerror(28))

        def close(self) -> None:
            pass

    monkeypatch.setattr(Path, "open", lambda *_, **__: FullDisk())
    monkeypatch.setattr(record_files, "BATCH_S", 0.0)
    files = RecordFiles(tmp_path, "replica-0", 4)
    scheduler, recorder = create_recorded(files)
    run_load(scheduler)
    assert failed.wait(10)
    files._thread.join()
    run_load(scheduler)
    assert not recorder.is_on
    recorder.close()
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["replica-0: stopped the recording, serving continues: reason=[Errno 28] No space left on device"]
    assert not any("hash" in message for message in caplog.messages)


def test_folder_that_cannot_be_created_is_one_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    scheduler, recorder = create_recorded(RecordFiles(tmp_path / "file" / "folder", "replica-0", 4))
    run_load(scheduler)
    recorder.close()
    (error,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "Not a directory" in error


def test_recording_does_not_wait_for_a_hanging_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(self: RecordFiles) -> None:
        hangs.set()
        goes_on.wait()

    monkeypatch.setattr(RecordFiles, "_write", hang)
    monkeypatch.setattr(record_files, "BATCH_S", 0.0)
    monkeypatch.setattr(record_files, "MAX_PENDING_BYTES", 20_000)
    files = RecordFiles(tmp_path, "replica-0", 4)
    scheduler, recorder = create_recorded(files)
    run_load(scheduler)
    assert hangs.wait(10)
    for _ in range(40):
        run_load(scheduler)
    assert not files.is_open
    assert files._pending == []
    goes_on.set()
    recorder.close()
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["replica-0: stopped the recording, serving continues: reason=20000 bytes wait to be written"]
