"""The accepted requests that clients may repeat, found by stream or key, and their log on disk.

Requests are dropped when they are too old, and the oldest ones when memory is full. Files `requests-N.log` hold
records: length and CRC-32 of the content as little-endian 32-bit integers, then the content as MessagePack. Reading
stops at a damaged record, which a killed process may leave. The next append removes it first.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from llm_serving.config.output_settings import output_settings
from llm_serving.config.schema import ServingConfig
from llm_serving.core.files import lock_folder
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import IdempotencyError, RequestNotFoundError
from llm_serving.log import get_logger
from llm_serving.server.tenant_quota import StoredSizes, TenantQuota

OVERHEAD_BYTES: Final = 1024
"""Estimated bytes of a record without the request and its names."""
logger = get_logger(__name__)

NUM_FILES: Final = 4
"""Number of files of a full log. Deleting the oldest one frees a quarter of the bytes."""
WAIT_S: Final = 1.0
MAX_WAITING_BYTES: Final = 2**25
"""Maximum bytes of records that wait for a disk that hangs. Further records are not logged."""
_NAME: Final = re.compile(r"requests-(0|[1-9][0-9]{0,17})\.log")
_HEAD: Final = struct.Struct("<II")
_encode: Final = msgspec.msgpack.Encoder().encode


class AcceptedRequest(msgspec.Struct, kw_only=True, frozen=True):
    stream_id: str
    """Id of the stream. It is random, so that no other client can predict it."""
    route: str
    tenant: str
    key: str
    digest: bytes
    request: bytes
    seed: int
    seeded: bool
    streams: bool
    request_id: str
    created: int
    model: bytes
    """Digest of what the response depends on: the model, its configuration and kernels."""
    prompts: bytes
    accepted_at: float

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.request) + len(self.key) + len(self.tenant) + len(self.request_id)


_decode: Final = msgspec.msgpack.Decoder(AcceptedRequest).decode


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """The exclusive right of one request to a key. Other requests with the key wait."""

    name: tuple[str, str]
    digest: bytes
    settled: asyncio.Future[None]


class AcceptedRequests:
    """The accepted requests that clients may repeat, each for `max_age_s`. A `quota` of 0 bytes stores none. Only the
    event loop may use it. The age of a record is read from `wall_clock` when it is stored, then measured by `clock`.
    """

    def __init__(
        self, quota: TenantQuota, max_age_s: float, wall_clock: Callable[[], float], clock: Clock = monotonic
    ) -> None:
        self._max_bytes = quota.num_bytes
        self._max_age_s = max_age_s
        self._wall_clock = wall_clock
        self._clock = clock
        self._sizes = StoredSizes(quota)
        self._records: dict[str, AcceptedRequest] = {}
        self._known_until: dict[str, float] = {}
        self._by_key: dict[tuple[str, str], AcceptedRequest] = {}
        self._claims: dict[tuple[str, str], Claim] = {}
        self.log: LogFile | None = None

    def __len__(self) -> int:
        return len(self._records)

    def peek(self, stream_id: str) -> AcceptedRequest | None:
        return self._records.get(stream_id)

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    def find(self, field: str, stream_id: str, tenant: str | None) -> AcceptedRequest:
        """Return the request of a resumable stream. Raise RequestNotFoundError if the tenant has no such stream."""
        self._expire()
        record = self._records.get(stream_id)
        if record is None or not record.streams or tenant not in (None, record.tenant):
            raise RequestNotFoundError(field, "must be the id of a stream whose request is still stored")
        return record

    async def claim(self, tenant: str, key: str, digest: bytes) -> AcceptedRequest | Claim:
        """Return the accepted request of a key. If there is none, return a claim, which holds the key until `settle`.
        Wait while another request holds the key. Raise IdempotencyError if the key belongs to a different request.
        """
        name = (tenant, key)
        while True:
            self._expire()
            if (claim := self._claims.get(name)) is not None:
                _check(key, claim.digest, digest)
                await asyncio.shield(claim.settled)
                continue
            if (record := self._by_key.get(name)) is not None:
                _check(key, record.digest, digest)
                return record
            claim = self._claims[name] = Claim(name, digest, asyncio.get_running_loop().create_future())
            return claim

    def settle(self, claim: Claim) -> None:
        """Release a claimed key, whose request was added or refused. A second call has no effect."""
        if self._claims.get(claim.name) is claim:
            del self._claims[claim.name]
            claim.settled.set_result(None)

    async def add(self, record: AcceptedRequest) -> None:
        """Store a record as `restore` does. If it was stored, also append it to the log."""
        self.restore(record)
        if self.log is not None and record.stream_id in self._records:
            await self.log.append(record)

    def restore(self, record: AcceptedRequest) -> None:
        """Store a record, unless it is too old or too large. If memory is full, evict records of the largest tenant."""
        age_s = max(0.0, self._wall_clock() - record.accepted_at)
        if record.stream_id in self._records or age_s > self._max_age_s:
            return
        self._expire()
        older = self._sizes.evictions(record.tenant, record.num_bytes)
        if older is None:
            return
        for stream_id in older:
            self._forget(self._records[stream_id])
        self._records[record.stream_id] = record
        self._sizes.add(record.stream_id, record.tenant, record.num_bytes)
        self._known_until[record.stream_id] = self._clock() + self._max_age_s - age_s
        if record.key:
            self._by_key[record.tenant, record.key] = record

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := next(iter(self._records.values()), None)) and self._known_until[oldest.stream_id] < now:
            self._forget(oldest)

    def _forget(self, record: AcceptedRequest) -> None:
        del self._records[record.stream_id], self._known_until[record.stream_id]
        self._sizes.remove(record.stream_id)
        if self._by_key.get((record.tenant, record.key)) is record:
            del self._by_key[record.tenant, record.key]


def _check(key: str, known: bytes, digest: bytes) -> None:
    if not hmac.compare_digest(known, digest):
        raise IdempotencyError("Idempotency-Key", "must be a new key for a different request", key)


class ModelState:
    def __init__(self, config: ServingConfig) -> None:
        model = config.model
        named = (model.model_path, model.tokenizer_path, model.mindir_path, model.mindir_ini)
        folders = [each for each in named if each is not None]
        files: list[Any] = []
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
                try:
                    found = path.stat()
                except OSError:  # a broken symbolic link
                    continue
                files.append((path.name, found.st_size, found.st_mtime_ns))
        state = (files, sorted(output_settings(config).items()), model.generation_config, model.end_token)
        self._state = msgspec.msgpack.encode(state)

    def digest(
        self, compute_fingerprint: ComputeFingerprint, max_model_len: int, max_input_len: int, adapter: int = 0
    ) -> bytes:
        """Return a digest that is equal only if model, settings and adapter (0: base model) give the same responses."""
        state = self._state + msgspec.msgpack.encode((compute_fingerprint, max_model_len, max_input_len, adapter))
        return hashlib.blake2b(state, digest_size=16).digest()


class LogFile:
    """The disk log of accepted requests. A write error ends logging. Raise ConfigError if the folder is unusable."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._file_bytes = max(1, max_bytes // NUM_FILES)
        self._thread = ThreadPoolExecutor(1, "request-log")
        self._broken = False
        self._num_waiting_bytes = 0
        self._num_lost = 0
        self._is_late = False
        """Whether a request has waited `WAIT_S` for the disk, and no record was written since."""
        self._lock = lock_folder(folder, "serving_config.request_log_path", 0o700)
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
        """Write a record, and wait up to `WAIT_S` for it. Drop it if more than `MAX_WAITING_BYTES` would wait."""
        if self._broken:
            return
        content = _encode(record)
        if self._num_waiting_bytes + len(content) > MAX_WAITING_BYTES:
            self._num_lost += 1
            if self._num_lost == 1:
                logger.error(
                    "%s: the disk is too slow; new requests are not logged until it has written the waiting records",
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
            logger.error("%s: logging of requests has resumed; lost_records=%d", self._folder, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
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
