"""Records of accepted requests in files that stay readable even if the process is killed.

A file `requests-N.log` holds records: length and CRC-32 of the content as little-endian 32-bit integers, then the
content as MessagePack. Reading stops at a damaged record, which is removed before the next record is appended.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from llm_serving.core.files import lock_file
from llm_serving.errors import ConfigError
from llm_serving.log import get_logger
from llm_serving.server.idempotency.store import AcceptedRequest

logger = get_logger(__name__)

NUM_FILES: Final = 4
"""Number of files of a full log. Deleting the oldest one frees a quarter of the bytes."""
WAIT_S: Final = 1.0
"""Maximum seconds that a response waits for the disk."""
MAX_WAITING_BYTES: Final = 2**25
"""Maximum bytes of records that wait for a disk that hangs. Further records are not logged."""
_NAME: Final = re.compile(r"requests-(0|[1-9][0-9]{0,17})\.log")
_HEAD: Final = struct.Struct("<II")
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(AcceptedRequest).decode


class LogFile:
    """The log of accepted requests. A write error ends it. Raise ConfigError if the folder cannot be used."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = max(1, max_bytes // NUM_FILES)
        self._thread = ThreadPoolExecutor(1, "request-log")
        self._broken = False
        self._num_waiting_bytes = 0
        self._num_lost = 0
        self._is_late = False
        """Whether a request has waited `WAIT_S` for the disk, and no record was written since."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = lock_file(folder / "lock")
        except OSError as error:
            raise ConfigError(f"serving_config.request_log_path: {folder} cannot be used: {error.strerror}") from None
        if lock is None:
            raise ConfigError(f"serving_config.request_log_path: {folder} is used by another server")
        self._lock = lock
        names = (_NAME.fullmatch(path.name) for path in folder.iterdir())  # files with other names stay
        self._numbers = sorted(int(name[1]) for name in names if name is not None)
        self._file = -1
        self._size = 0

    def read(self) -> Iterator[AcceptedRequest]:
        """Yield all valid records, oldest first. Read all of them before the first `append`."""
        number, end = 0, 0
        for number in self._numbers:
            path, end = self._path(number), 0
            try:
                data = path.read_bytes()
            except OSError as error:
                logger.warning("%s: cannot be read: %s", path, error.strerror)
                number += 1  # append to a new file, not to this one
                continue
            for record, record_end in _records(path, data):
                end = record_end
                yield record
        try:
            self._open(number, end)
        except OSError as error:
            self._end(error)

    async def append(self, record: AcceptedRequest) -> None:
        """Write a record. Return when the record is written, or after `WAIT_S`."""
        if self._broken:
            return
        content = _encode(record)
        if self._num_waiting_bytes + len(content) > MAX_WAITING_BYTES:
            self._num_lost += 1
            if self._num_lost == 1:
                logger.error(
                    "%s: the disk is too slow; requests are not logged until it has written the waiting ones",
                    self._folder,
                )
            return
        self._num_waiting_bytes += len(content)
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, content)
        writing.add_done_callback(lambda _: self._has_written(len(content)))
        if not self._is_late:
            done, _ = await asyncio.wait([writing], timeout=WAIT_S)
            self._is_late = not done

    def _has_written(self, size: int) -> None:
        self._is_late = False
        self._num_waiting_bytes -= size
        if self._num_waiting_bytes == 0 and self._num_lost:
            logger.error("%s: requests are logged again; %d records were lost", self._folder, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Write the remaining records and unlock the folder."""
        self._thread.shutdown()
        if self._file >= 0:
            os.close(self._file)
        os.close(self._lock)

    def _write(self, content: bytes) -> None:
        if self._broken:
            return
        data = _HEAD.pack(len(content), zlib.crc32(content)) + content
        if len(data) > self._file_bytes:  # it would evict all other records
            return
        try:
            if self._size and self._size + len(data) > self._file_bytes:
                self._begin_next()
            if os.write(self._file, data) != len(data):
                raise OSError(0, "a record was written only partly")
            self._size += len(data)
        except OSError as error:
            self._end(error)

    def _begin_next(self) -> None:
        os.close(self._file)
        self._file = -1
        while len(self._numbers) >= NUM_FILES:
            self._path(self._numbers.pop(0)).unlink(missing_ok=True)
        self._open(self._numbers[-1] + 1, 0)

    def _open(self, number: int, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path(number), flags, 0o600)
        os.ftruncate(self._file, size)
        self._size = size
        if number not in self._numbers:
            self._numbers.append(number)

    def _end(self, error: OSError) -> None:
        self._broken = True
        logger.error(
            "%s: no more requests are logged until the server restarts: %s", self._folder, error.strerror or error
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"requests-{number}.log"


def _records(path: Path, data: bytes) -> Iterator[tuple[AcceptedRequest, int]]:
    """Yield (record, offset of its end) for each valid record of a file."""
    offset = 0
    while offset + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, offset)
        content = data[offset + _HEAD.size : offset + _HEAD.size + length]
        if len(content) != length or zlib.crc32(content) != checksum:
            break
        try:
            record = _decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError):  # written by another version
            break
        offset += _HEAD.size + length
        yield record, offset
    if offset < len(data):
        logger.warning("%s: ignored the content after byte %d, which is not a valid record", path, offset)
