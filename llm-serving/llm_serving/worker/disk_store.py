"""Blocks of the KV cache in a folder on a local disk, one file for each block.

    FOLDER/lock                   locked while a process changes the folder; holds the size of all files
    FOLDER/<fingerprint>/<hash>   a block: header, contents, checksum of both

The fingerprint covers everything that affects the contents; the hash covers the tokens, the tenant and the cache salt
(`kvcache.block_table`). Files are not flushed to disk: after a power failure one may be incomplete, which its checksum
reveals. Readers take no lock, because an open file can be read to its end after it was deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from llm_serving.core.fingerprint import ComputeFingerprint, code_fingerprint
from llm_serving.formats.gguf import files_of
from llm_serving.log import get_logger
from llm_serving.models.gguf import is_gguf
from llm_serving.models.weight_reader import weight_fingerprint
from llm_serving.transport.messages import LoadModel

logger = get_logger(__name__)

MAGIC: Final = b"LLMKV001"
_HEADER: Final = struct.Struct("<8s16s16sQ")
DIGEST_BYTES: Final = 16
OVERHEAD_BYTES: Final = _HEADER.size + DIGEST_BYTES
TEMPORARY: Final = "temporary"
_HEX: Final = re.compile(r"[0-9a-f]{32}")
KEPT_FRACTION: Final = 0.9
"""Fraction of `max_bytes` that remains after an eviction. A value below 1 makes evictions rare."""


class Written(NamedTuple):
    is_new: bool
    """Whether the block was written; otherwise it was already stored, or the folder cannot be used."""
    num_evicted: int = 0


class _File(NamedTuple):
    used_ns: int
    path: str
    num_bytes: int


class DiskStore:
    """Reads and writes the blocks of one model in a folder that other processes and models may use too. All files
    together have at most `max_bytes`. No error of the disk is raised: a block that cannot be read counts as missing,
    and one that cannot be written is not stored. The first error after a success is logged.
    """

    def __init__(self, folder: Path, max_bytes: int, fingerprint: bytes) -> None:
        self.folder = folder
        self.num_bytes = -1
        """Size of all files when this process last changed the folder, or -1 if it is unknown."""
        self.num_damaged = 0
        self._max_bytes = max_bytes
        self._fingerprint = fingerprint
        self._own = folder / fingerprint.hex()
        self._failed = False
        self._skipped: set[Path] = set()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as lock:
                self._evict(lock, 0)
        except OSError as error:
            self._record_failure(error)
        else:
            text = "disk cache: %.1f of %.1f MiB used in %s, fingerprint %s"
            logger.info(text, self.num_bytes / 2**20, max_bytes / 2**20, folder, fingerprint.hex()[:12])

    def touch(self, hashes: Sequence[bytes]) -> int:
        """Mark the blocks before the first missing one as used now. Return the number of these blocks."""
        for index, each in enumerate(hashes):
            try:
                os.utime(self._own / each.hex())
            except FileNotFoundError:
                return index
            except OSError as error:  # in a read-only folder, blocks can be read but not marked as used
                self._record_failure(error)
                if not os.access(self._own / each.hex(), os.R_OK):
                    return index
        return len(hashes)

    def read(self, block_hash: bytes) -> bytes | None:
        """Return a block's contents, or None if it is no readable regular file. Delete a damaged file."""
        path = self._own / block_hash.hex()
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                self._skip(path)
                return None
            content = path.read_bytes() if found.st_size <= self._max_bytes else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            self._record_failure(error)
            return None
        end = len(content) - DIGEST_BYTES
        header = _HEADER.pack(MAGIC, self._fingerprint, block_hash, max(0, end - _HEADER.size))
        digest = blake2b(content[:end], digest_size=DIGEST_BYTES).digest()
        if content[: _HEADER.size] == header and digest == content[end:]:
            return content[_HEADER.size : end]
        self.num_damaged += 1
        logger.warning("disk cache: deleted the damaged file %s; the model computes its block", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def write(self, block_hash: bytes, content: bytes) -> Written:
        path = self._own / block_hash.hex()
        num_bytes = len(content) + OVERHEAD_BYTES
        if num_bytes > self._max_bytes or os.access(path, os.F_OK):
            return Written(is_new=False)
        header = _HEADER.pack(MAGIC, self._fingerprint, block_hash, len(content))
        digest = blake2b(header, digest_size=DIGEST_BYTES)
        digest.update(content)
        temporary = self._own / TEMPORARY
        try:
            with self._locked() as lock:
                total, num_evicted = _read_total(lock), 0
                if total is None or total + num_bytes > self._max_bytes:
                    total, num_evicted = self._evict(lock, num_bytes)
                self._own.mkdir(mode=0o700, exist_ok=True)
                # The size comes first: if this process is killed before it has written the file, the size is too large.
                self._write_total(lock, total + num_bytes)
                try:
                    temporary.unlink(missing_ok=True)  # a killed process left it; opening a named pipe would block
                    with temporary.open("xb") as file:
                        file.writelines((header, content, digest.digest()))
                    temporary.rename(path)
                except OSError:
                    with contextlib.suppress(OSError):
                        temporary.unlink()
                        self._write_total(lock, total)
                    raise
        except OSError as error:
            self._record_failure(error)
            return Written(is_new=False)
        if self._failed:
            self._failed = False
            logger.info("disk cache: %s can be used again", self.folder)
        return Written(is_new=True, num_evicted=num_evicted)

    def _evict(self, lock: int, num_bytes: int) -> tuple[int, int]:
        """Delete least recently used blocks until `num_bytes` more fit. Return (bytes that remain, blocks deleted)."""
        files, num_evicted = sorted(self._files()), 0
        total = sum(each.num_bytes for each in files)
        kept = self._max_bytes if total + num_bytes <= self._max_bytes else int(KEPT_FRACTION * self._max_bytes)
        for each in files:
            if total + num_bytes <= kept or total == 0:
                break
            Path(each.path).unlink(missing_ok=True)  # a reader may have deleted it as damaged
            total -= each.num_bytes
            num_evicted += 1
        self._write_total(lock, total)
        for folder in {os.path.dirname(each.path) for each in files[:num_evicted]} - {str(self._own)}:  # noqa: PTH120
            with contextlib.suppress(OSError):  # the folder is not empty
                os.rmdir(folder)  # noqa: PTH106
        return total, num_evicted

    def _files(self) -> Iterator[_File]:
        """Yield the blocks of all models. Delete temporary files of killed processes. Skip files of other programs."""
        for model in os.scandir(self.folder):
            if not model.is_dir(follow_symlinks=False) or not _HEX.fullmatch(model.name):
                continue
            for entry in os.scandir(model.path):
                if not entry.is_file(follow_symlinks=False):
                    continue
                if entry.name == TEMPORARY:
                    Path(entry.path).unlink()
                elif _HEX.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        yield _File(found.st_mtime_ns, entry.path, found.st_size)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Yield the descriptor of the lock file while it is locked. The kernel unlocks it when a process ends."""
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock
        finally:
            os.close(lock)

    def _write_total(self, lock: int, total: int) -> None:
        os.pwrite(lock, b"%020d" % total, 0)
        self.num_bytes = total

    def _skip(self, path: Path) -> None:
        if path not in self._skipped:
            self._skipped.add(path)
            logger.warning("disk cache: skipped %s, which is not a regular file; the model computes its block", path)

    def _record_failure(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            reason = error.strerror or str(error)
            text = "disk cache: %s: %s. No blocks are stored; blocks that cannot be read are computed."
            logger.warning(text, self.folder, reason)
        self.num_bytes = -1


def _read_total(lock: int) -> int | None:
    text = os.pread(lock, 20, 0)
    return int(text) if len(text) == 20 and text.isdigit() else None


def open_disk_store(
    settings: LoadModel, compute_fingerprint: ComputeFingerprint, arrays: Sequence[NDArray[np.generic]]
) -> DiskStore:
    """Open the disk cache for blocks of the KV cache `arrays`, each [num_blocks, ...]."""
    model, pa, quant, device = settings.model.folder, settings.pa, settings.quant, settings.device
    assert pa.disk_cache_path is not None
    files = files_of(model) if is_gguf(model) else [*model.iterdir()]
    covered = (
        code_fingerprint(),
        weight_fingerprint(model),
        sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files if each.is_file()),
        compute_fingerprint,
        [(array.dtype.str, array.shape[1:]) for array in arrays],
        *(settings.model.model_dtype, quant.quantization, quant.group_size, quant.kv_cache_dtype),
        *(settings.model.implementation, device.kernels, device.exactness, pa.block_size),
        *(settings.model.max_generate_length, device.device_target, settings.num_ranks, settings.rank),
    )
    fingerprint = blake2b(msgspec.msgpack.encode(covered), digest_size=16).digest()
    return DiskStore(pa.disk_cache_path, pa.disk_cache_bytes, fingerprint)
