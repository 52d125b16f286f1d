"""Blocks in files: bounds, eviction, damaged files, disks that fail, and processes that are killed while they write."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from llm_serving.config import load_config
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.executor.supervisor import load_settings
from llm_serving.worker import disk_store
from llm_serving.worker.disk_store import DIGEST_BYTES, OVERHEAD_BYTES, TEMPORARY, DiskStore, Written, open_disk_store
from support.small_model import write_small_model

MODEL, OTHER_MODEL = bytes(16), bytes([1] * 16)
CONTENT = bytes(range(200)) * 5
FILE_BYTES = len(CONTENT) + OVERHEAD_BYTES


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def use_at(folder: Path, number: int, seconds: int, model: bytes = MODEL) -> None:
    os.utime(folder / model.hex() / name(number).hex(), (seconds, seconds))


def test_a_block_survives_its_process_and_belongs_to_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    store = DiskStore(folder, 10**6, MODEL)
    assert store.read(name(1)) is None
    assert store.write(name(1), CONTENT) == Written(is_new=True)
    assert store.write(name(1), CONTENT) == Written(is_new=False)
    again = DiskStore(folder, 10**6, MODEL)
    assert again.num_bytes == FILE_BYTES
    assert again.read(name(1)) == CONTENT
    assert again.touch([name(1), name(2), name(1)]) == 1
    assert DiskStore(folder, 10**6, OTHER_MODEL).read(name(1)) is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_of_another_model_or_block_is_not_used_under_this_name(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 10**6, MODEL), DiskStore(tmp_path, 10**6, OTHER_MODEL)
    store.write(name(1), CONTENT)
    other.write(name(2), CONTENT)
    shutil.copy(tmp_path / MODEL.hex() / name(1).hex(), tmp_path / MODEL.hex() / name(3).hex())
    shutil.copy(tmp_path / OTHER_MODEL.hex() / name(2).hex(), tmp_path / MODEL.hex() / name(2).hex())
    assert (store.read(name(3)), store.read(name(2)), store.num_damaged) == (None, None, 2)
    assert store.read(name(1)) == CONTENT


@pytest.mark.parametrize("position", [0, 7, 8, 23, 24, 39, 40, 47, 48, 500, -DIGEST_BYTES - 1, -DIGEST_BYTES, -1])
def test_a_changed_byte_is_detected_and_the_file_deleted(
    tmp_path: Path, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 10**6, MODEL)
    store.write(name(1), CONTENT)
    path = tmp_path / MODEL.hex() / name(1).hex()
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert store.read(name(1)) is None
    assert (store.num_damaged, path.exists()) == (1, False)
    assert "disk cache: deleted the damaged file" in caplog.text
    assert store.write(name(1), CONTENT).is_new
    assert store.read(name(1)) == CONTENT


@pytest.mark.parametrize("num_bytes", [0, 1, 47, 48, 64, 500, FILE_BYTES - 1, FILE_BYTES + 1])
def test_a_file_of_another_length_is_detected(tmp_path: Path, num_bytes: int) -> None:
    store = DiskStore(tmp_path, 10**6, MODEL)
    store.write(name(1), CONTENT)
    path = tmp_path / MODEL.hex() / name(1).hex()
    path.write_bytes((path.read_bytes() + b"\0")[:num_bytes])
    assert (store.read(name(1)), path.exists()) == (None, False)


def test_the_least_recently_used_blocks_of_all_models_make_room(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, 10 * FILE_BYTES, MODEL), DiskStore(tmp_path, 10 * FILE_BYTES, OTHER_MODEL)
    other.write(name(0), CONTENT)
    use_at(tmp_path, 0, 1, OTHER_MODEL)
    for number in range(1, 10):
        assert store.write(name(number), CONTENT) == Written(is_new=True)
        use_at(tmp_path, number, 100 + number)
    store.touch([name(1)])
    assert store.write(name(10), CONTENT) == Written(is_new=True, num_evicted=2), "down to nine tenths"
    kept = {int.from_bytes(bytes.fromhex(path.name), "little") for path in (tmp_path / MODEL.hex()).iterdir()}
    assert kept == {1, 3, 4, 5, 6, 7, 8, 9, 10}
    assert not (tmp_path / OTHER_MODEL.hex()).exists(), "empty folders are removed"
    assert store.num_bytes == 9 * FILE_BYTES
    assert other.write(name(0), CONTENT).is_new


def test_a_smaller_bound_applies_at_the_next_start(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6, MODEL)
    for number in range(10):
        store.write(name(number), CONTENT)
    assert DiskStore(tmp_path, 5 * FILE_BYTES, MODEL).num_bytes <= 5 * FILE_BYTES
    assert sum(path.stat().st_size for path in (tmp_path / MODEL.hex()).iterdir()) <= 5 * FILE_BYTES
    tiny = DiskStore(tmp_path, FILE_BYTES - 1, MODEL)
    assert (tiny.num_bytes, tiny.write(name(1), CONTENT)) == (0, Written(is_new=False))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10**6, MODEL)
    store.write(name(1), CONTENT)
    (tmp_path / MODEL.hex() / TEMPORARY).write_bytes(CONTENT)
    (tmp_path / "lock").write_text("999999")  # a wrong size, as after a kill or a power failure
    assert store.write(name(2), CONTENT).is_new
    assert store.num_bytes == 2 * FILE_BYTES
    assert not (tmp_path / MODEL.hex() / TEMPORARY).exists()
    (tmp_path / "lock").write_bytes(b"")
    assert DiskStore(tmp_path, 10**6, MODEL).num_bytes == 2 * FILE_BYTES


def test_what_other_programs_wrote_is_neither_deleted_nor_read(tmp_path: Path) -> None:
    kept = [tmp_path / ("z" * 32) / "notes", tmp_path / MODEL.hex() / "notes"]
    for path in kept:
        path.parent.mkdir()
        path.write_bytes(CONTENT)
    (tmp_path / MODEL.hex() / TEMPORARY).mkdir()
    store = DiskStore(tmp_path, 2 * FILE_BYTES, MODEL)
    with (tmp_path / MODEL.hex() / name(3).hex()).open("wb") as file:
        file.truncate(2**40)
    assert store.read(name(3)) is None
    assert store.num_damaged == 1
    (tmp_path / MODEL.hex() / TEMPORARY).rmdir()
    for number in range(4, 8):
        assert store.write(name(number), CONTENT).is_new
    assert all(path.exists() for path in kept)


def test_files_that_are_not_regular_are_skipped_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 10**6, MODEL)
    assert store.write(name(1), CONTENT).is_new
    own = tmp_path / MODEL.hex()
    os.mkfifo(own / name(2).hex())
    (own / name(3).hex()).mkdir()
    (own / name(4).hex()).symlink_to("/dev/zero")
    os.mkfifo(own / TEMPORARY)
    for number in (2, 3, 4, 2, 3, 4):
        assert store.read(name(number)) is None
        assert not store.write(name(number), CONTENT).is_new
    assert caplog.text.count("which is not a regular file") == 3
    assert store.write(name(5), CONTENT).is_new, "a pipe with the temporary name does not block"
    assert [store.read(name(number)) for number in (1, 5)] == [CONTENT, CONTENT]
    assert DiskStore(tmp_path, 10**6, MODEL).num_bytes == 2 * FILE_BYTES
    assert len([*own.iterdir()]) == 5, "they are left alone"
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    assert not store.write(name(6), CONTENT).is_new
    assert caplog.text.count("Illegal seek. No blocks are stored") == 1


WRITER = """
import sys
from pathlib import Path
from llm_serving.worker.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), 3_000_000, bytes(16))
for number in range(10**9):
    store.write(number.to_bytes(16, "little"), number.to_bytes(8, "little") * 20_000)
    print(number, flush=True)
"""


def test_processes_killed_while_they_write_leave_only_whole_blocks_within_the_bound(tmp_path: Path) -> None:
    for attempt in range(6):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            for number in range(1 + 8 * attempt):
                assert writer.stdout.readline() == b"%d\n" % number
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        store = DiskStore(tmp_path, 3_000_000, MODEL)
        files = [path for path in (tmp_path / MODEL.hex()).iterdir() if path.name != TEMPORARY]
        assert sum(path.stat().st_size for path in files) == store.num_bytes <= 3_000_000
        for path in files:
            block = bytes.fromhex(path.name)
            assert store.read(block) == block[:8] * 20_000
        assert store.num_damaged == 0


def test_a_full_disk_stores_nothing_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path, 10**6, MODEL)
    store.write(name(1), CONTENT)

    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full, caplog.at_level(logging.INFO):
        full.setattr(Path, "rename", refuse)
        assert not store.write(name(2), CONTENT).is_new
        assert not store.write(name(3), CONTENT).is_new
        assert caplog.text.count("No space left on device. No blocks are stored") == 1
        assert store.read(name(1)) == CONTENT
        assert [path.name for path in (tmp_path / MODEL.hex()).iterdir()] == [name(1).hex()]
    with caplog.at_level(logging.INFO):
        assert store.write(name(2), CONTENT).is_new
    assert "can be used again" in caplog.text
    assert store.num_bytes == 2 * FILE_BYTES


def test_a_removed_folder_is_reported_once_and_used_again_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache"
    store = DiskStore(folder, 10**6, MODEL)
    store.write(name(1), CONTENT)
    shutil.rmtree(folder)
    assert (store.read(name(1)), store.touch([name(1)])) == (None, 0)
    assert not store.write(name(1), CONTENT).is_new
    assert not store.write(name(2), CONTENT).is_new
    assert caplog.text.count("No such file or directory") == 1
    assert store.num_bytes == -1
    folder.mkdir()
    assert store.write(name(1), CONTENT).is_new
    assert (store.read(name(1)), store.num_bytes) == (CONTENT, FILE_BYTES)


def test_blocks_of_a_read_only_folder_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    DiskStore(tmp_path, 10**6, MODEL).write(name(1), CONTENT)

    def refuse(*arguments: object, **options: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_store.os, "utime", refuse)
    monkeypatch.setattr(disk_store.os, "open", refuse)
    store = DiskStore(tmp_path, 10**6, MODEL)
    assert store.touch([name(1), name(2)]) == 1
    assert store.read(name(1)) == CONTENT
    assert not store.write(name(2), CONTENT).is_new
    assert caplog.text.count("Read-only file system. No blocks are stored") == 1


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = DiskStore(tmp_path / "file" / "cache", 10**6, MODEL)
    assert (store.touch([name(1)]), store.read(name(1)), store.write(name(1), CONTENT).is_new) == (0, None, False)
    assert caplog.text.count("Not a directory") == 1


def test_the_fingerprint_covers_the_weights_the_kernels_and_the_settings(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_small_model(model)
    cache = [f"pa_config.disk_cache_path={tmp_path / 'cache'}", "pa_config.disk_cache_bytes=1M"]
    settings = load_settings(load_config(None, cache, model), 0)
    compute, arrays = ComputeFingerprint(kernels="program"), [np.zeros((9, 2, 16, 8), np.float32)]

    def folder(**sections: dict[str, object]) -> Path:
        changed = {name: replace(getattr(settings, name), **changes) for name, changes in sections.items()}
        return open_disk_store(msgspec.structs.replace(settings, **changed), compute, arrays)._own

    def folder_of(compute: ComputeFingerprint, *arrays: np.ndarray) -> Path:
        return open_disk_store(settings, compute, arrays)._own

    first = folder()
    assert folder(pa={"num_blocks": 7}, model={"decode_batch_size": 3}, device={"num_threads": 1}) == first
    others = [
        folder(model={"model_dtype": "float16"}),
        folder(quant={"quantization": "w8a8"}),
        folder(quant={"kv_cache_dtype": "int8"}),
        folder(pa={"block_size": 32}),
        folder(device={"exactness": "fast"}),
        folder_of(ComputeFingerprint(kernels="program", instruction_set="avx2"), *arrays),
        folder_of(compute, np.zeros((9, 2, 16, 9), np.float32)),
        folder_of(compute, np.zeros((9, 2, 16, 8), np.float16)),
    ]
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    others.append(folder())
    os.utime(weights, (1, 1))
    others.append(folder())
    assert len({first, *others}) == 1 + len(others)
