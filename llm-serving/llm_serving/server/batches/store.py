"""The SQLite database of files and batches. It stays consistent if the process is killed at any moment."""

from __future__ import annotations

import math
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from llm_serving.core.files import lock_file
from llm_serving.errors import ConfigError, RequestNotFoundError, RequestTooLargeError, StoreFullError
from llm_serving.server.batches.schemas import AnsweredLine, Batch, Failure, FileObject, Line, LineAnswer, RequestCounts
from llm_serving.server.tenant_quota import TenantQuota

T = TypeVar("T")

CHUNK_BYTES: Final = 2**18
KEPT_S: Final = 30 * 24 * 3600
"""Lifetime of files and of batches that have ended."""
MAX_IDLE_LOG_BYTES: Final = 2**22
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, about BLOB NOT NULL, created REAL NOT NULL, expires INTEGER NOT NULL,
    bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (
    file TEXT NOT NULL REFERENCES files ON DELETE CASCADE, number INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (file, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, about BLOB NOT NULL, created REAL NOT NULL, ended INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE, number INTEGER NOT NULL, custom_id TEXT NOT NULL,
    url TEXT NOT NULL, body BLOB NOT NULL, status INTEGER, answer BLOB, PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ignored (
    batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE, number INTEGER NOT NULL, names TEXT NOT NULL,
    PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inputs (
    batch TEXT PRIMARY KEY REFERENCES batches ON DELETE CASCADE, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outputs (
    batch TEXT PRIMARY KEY REFERENCES batches ON DELETE CASCADE, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS waiting ON lines (batch, number) WHERE status IS NULL;
CREATE INDEX IF NOT EXISTS unfinished ON batches (tenant, created) WHERE NOT ended;
"""
_KEPT: Final = """SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(bytes) FILTER (WHERE tenant = ?), 0) FROM (
    SELECT tenant, bytes + LENGTH(about) AS bytes FROM files
    UNION ALL SELECT tenant, LENGTH(about) FROM batches
    UNION ALL SELECT tenant, bytes FROM outputs JOIN batches ON id = batch)"""
"""Query of the bytes stored by all tenants, and by one tenant. Answers of unfinished batches count."""
_INPUTS: Final = """SELECT COALESCE(SUM(bytes), 0), COALESCE(SUM(bytes) FILTER (WHERE tenant = ?), 0)
    FROM inputs JOIN batches ON id = batch WHERE NOT ended"""


class PendingLine(NamedTuple):
    """A line without an answer. Its body is read from the database only when it is sent."""

    number: int
    url: str


class BatchStore:
    """The database of files, batches and their lines. Each call is one transaction. Only one thread may use it. A
    locked file `PATH.lock` excludes a second process. Raise ConfigError if the database cannot be used. The quota
    `shares` applies twice: to all stored bytes, and to the inputs of unfinished batches.
    """

    def __init__(self, path: Path, shares: TenantQuota) -> None:
        self._shares = shares
        try:
            if path.exists() and not path.is_file():  # chmod must not change a device, and opening a pipe would block
                raise ConfigError(f"serving_config.batch_path: {path} must be a regular file")
            path.parent.mkdir(parents=True, exist_ok=True)
            if (lock := lock_file(lock_of(path))) is None:
                raise ConfigError(f"serving_config.batch_path: {path} is used by another process")
            self._lock = lock
            self._db = sqlite3.connect(path, isolation_level=None)
            path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA journal_size_limit = {MAX_IDLE_LOG_BYTES}")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._db.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"serving_config.batch_path: {path} cannot be used: {error}") from None

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def release_disk_space(self) -> None:
        """Try to free the disk space in the write-ahead log that a failed change has used."""
        with suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    # --- files ------------------------------------------------------------------------------------------------------

    def add_file(self, about: FileObject, tenant: str, chunks: Iterable[bytes], now: float) -> FileObject:
        """Store a file and set `about.bytes` to its size. Raise RequestTooLargeError if it exceeds the quota."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._insert(about, tenant, chunks, now, self._room(_KEPT, tenant))
        return about

    def has_room(self, tenant: str) -> bool:
        return self._room(_KEPT, tenant) > 0

    def _room(self, query: str, tenant: str) -> int:
        used, own = self._db.execute(query, (tenant,)).fetchone()
        return self._shares.room(used, own)

    def file(self, file_id: str, tenant: str | None) -> FileObject:
        """Return a file of `tenant`, or of any tenant if that is None. Raise RequestNotFoundError if there is none."""
        query = "SELECT about FROM files WHERE id = :id AND (:tenant IS NULL OR tenant = :tenant)"
        row = self._db.execute(query, {"id": file_id, "tenant": tenant}).fetchone()
        return _decoded(row, FileObject, "file_id")

    def files(self, tenant: str | None, purpose: str | None, limit: int, after: str | None) -> list[FileObject]:
        """Return up to `limit` files older than file `after`, newest first. An argument of None excludes no file."""
        if after is not None:
            self.file(after, tenant)
        query = """SELECT about FROM files WHERE (:tenant IS NULL OR tenant = :tenant)
            AND (:after IS NULL OR (created, rowid) < (SELECT created, rowid FROM files WHERE id = :after))
            ORDER BY created DESC, rowid DESC"""
        rows = self._db.execute(query, {"tenant": tenant, "after": after})
        found = (msgspec.json.decode(about, type=FileObject) for (about,) in rows)
        matching = (each for each in found if purpose in (None, each.purpose))
        return [each for each, _ in zip(matching, range(limit), strict=False)]

    def chunk(self, file_id: str, number: int) -> bytes | None:
        query = "SELECT data FROM chunks WHERE file = ? AND number = ?"
        row = self._db.execute(query, (file_id, number)).fetchone()
        return None if row is None else bytes(row[0])

    def chunks(self, file_id: str) -> Iterator[bytes]:
        query = "SELECT data FROM chunks WHERE file = ? ORDER BY number"
        return (bytes(data) for (data,) in self._db.execute(query, (file_id,)))

    def delete_file(self, file_id: str) -> None:
        with self._db:
            self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    # --- batches ----------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch, tenant: str, now: float) -> None:
        """Store a new batch. Raise StoreFullError if its input does not fit, or no space is left for answers."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            query = "SELECT COALESCE((SELECT bytes FROM files WHERE id = ?), 0)"
            (size,) = self._db.execute(query, (batch.input_file_id,)).fetchone()
            if size > self._room(_INPUTS, tenant) or not self.has_room(tenant):
                what = "files and batches, and separately the inputs of unfinished batches,"
                raise StoreFullError(f"{what} {self._shares.rule}")
            row = (batch.id, tenant, msgspec.json.encode(batch), now, 0)
            self._db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", row)
            self._db.execute("INSERT INTO inputs VALUES (?, ?)", (batch.id, size))

    def delete_batch(self, batch_id: str) -> None:
        with self._db:
            self._db.execute("DELETE FROM batches WHERE id = ?", (batch_id,))

    def save(self, batch: Batch) -> None:
        with self._db:
            self._save(batch)

    def cancel(self, batch_id: str, now: float) -> Batch:
        batch = self.batch(batch_id, None)
        if not batch.has_ended and batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(now)
            self.save(batch)
        return batch

    def batch(self, batch_id: str, tenant: str | None) -> Batch:
        query = "SELECT about FROM batches WHERE id = :id AND (:tenant IS NULL OR tenant = :tenant)"
        row = self._db.execute(query, {"id": batch_id, "tenant": tenant}).fetchone()
        return self._counted(_decoded(row, Batch, "batch_id"))

    def batches(self, tenant: str | None, limit: int, after: str | None) -> list[Batch]:
        """Return up to `limit` batches older than batch `after`, newest first. A `tenant` of None matches all."""
        if after is not None:
            self.batch(after, tenant)
        query = """SELECT about FROM batches WHERE (:tenant IS NULL OR tenant = :tenant)
            AND (:after IS NULL OR (created, rowid) < (SELECT created, rowid FROM batches WHERE id = :after))
            ORDER BY created DESC, rowid DESC LIMIT :limit"""
        rows = self._db.execute(query, {"tenant": tenant, "after": after, "limit": limit}).fetchall()
        return [self._counted(msgspec.json.decode(about, type=Batch)) for (about,) in rows]

    def tenant_of(self, batch_id: str) -> str:
        row = self._db.execute("SELECT tenant FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return "" if row is None else str(row[0])

    def tenants(self) -> list[str]:
        return [tenant for (tenant,) in self._db.execute("SELECT DISTINCT tenant FROM batches WHERE NOT ended")]

    def unfinished(self, tenant: str, count: int) -> list[str]:
        query = "SELECT id FROM batches WHERE NOT ended AND tenant = ? ORDER BY created, rowid LIMIT ?"
        return [batch_id for (batch_id,) in self._db.execute(query, (tenant, count))]

    def add_lines(self, batch: Batch, lines: Iterable[Line]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            rows = ((batch.id, i, each.custom_id, each.url, bytes(each.body)) for i, each in enumerate(lines))
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, NULL, NULL)", rows)
            self._save(batch)

    def pending(self, batch_id: str, after: int, count: int) -> list[PendingLine]:
        query = """SELECT number, url FROM lines
            WHERE batch = ? AND number > ? AND status IS NULL ORDER BY number LIMIT ?"""
        return [PendingLine(*row) for row in self._db.execute(query, (batch_id, after, count))]

    def body(self, batch_id: str, number: int) -> bytes:
        query = "SELECT body FROM lines WHERE batch = ? AND number = ?"
        return bytes(self._db.execute(query, (batch_id, number)).fetchone()[0])

    def answer(self, batch_id: str, number: int, status: int, answer: bytes, ignored: str | None = None) -> None:
        """Store the answer to a line, and the names of its ignored fields. Only the first answer is kept."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            query = "UPDATE lines SET status = ?, answer = ? WHERE batch = ? AND number = ? AND status IS NULL"
            is_first = self._db.execute(query, (status, answer, batch_id, number)).rowcount
            if is_first and ignored is not None:
                self._db.execute("INSERT INTO ignored VALUES (?, ?, ?)", (batch_id, number, ignored))
            if is_first:
                query = "INSERT INTO outputs VALUES (?, ?) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes"
                self._db.execute(query, (batch_id, len(answer) + len(ignored or "")))

    def finish(self, batch: Batch, tenant: str, unanswered: Failure | None, now: float) -> None:
        """Write output and error files in line order. Omit unanswered lines, or give them the error `unanswered`."""
        batch.request_counts = self._counts(batch.id)
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for answered in (True, False):
                lines = self._output(batch.id, answered, unanswered)
                file_id = self._write(batch, tenant, answered, lines, now)
                if answered:
                    batch.output_file_id = file_id
                else:
                    batch.error_file_id = file_id
            self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
            self._db.execute("DELETE FROM ignored WHERE batch = ?", (batch.id,))
            self._db.execute("DELETE FROM outputs WHERE batch = ?", (batch.id,))
            self._save(batch)

    def expire(self, now: float) -> None:
        with self._db:
            self._db.execute("DELETE FROM files WHERE expires < ?", (now,))
            self._db.execute("DELETE FROM batches WHERE ended AND created < ?", (now - KEPT_S,))

    def _output(self, batch_id: str, answered: bool, unanswered: Failure | None) -> Iterator[bytes]:
        query = """SELECT number, custom_id, status, answer, names FROM lines LEFT JOIN ignored USING (batch, number)
            WHERE batch = ? ORDER BY number"""
        for number, custom_id, status, answer, ignored in self._db.execute(query, (batch_id,)):
            if (status == 200) != answered or (status is None and unanswered is None):
                continue
            line = AnsweredLine(id=f"{batch_id}-{number}", custom_id=custom_id)
            if status is None:
                line.error = unanswered
            else:
                line.response = LineAnswer(status, f"{batch_id}-{number}", msgspec.Raw(answer), ignored)
            yield msgspec.json.encode(line) + b"\n"

    def _write(self, batch: Batch, tenant: str, answered: bool, lines: Iterator[bytes], now: float) -> str | None:
        first = next(lines, None)
        if first is None:
            return None
        name = f"{batch.id}_{'output' if answered else 'error'}.jsonl"
        about = new_file(new_id("file"), name, "batch_output", now)
        self._insert(about, tenant, _chunks(first, lines), now)
        return about.id

    def _insert(
        self, about: FileObject, tenant: str, chunks: Iterable[bytes], now: float, most: float = math.inf
    ) -> None:
        row = (about.id, tenant, b"", now, about.expires_at, 0)
        self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        about.bytes = 0
        for number, chunk in enumerate(chunks):
            about.bytes += len(chunk)
            if about.bytes > most:
                raise RequestTooLargeError("file", f"must fit: all files together {self._shares.rule}")
            self._db.execute("INSERT INTO chunks VALUES (?, ?, ?)", (about.id, number, chunk))
        described = (msgspec.json.encode(about), about.bytes, about.id)
        self._db.execute("UPDATE files SET about = ?, bytes = ? WHERE id = ?", described)

    def _save(self, batch: Batch) -> None:
        row = (msgspec.json.encode(batch), int(batch.has_ended), batch.id)
        self._db.execute("UPDATE batches SET about = ?, ended = ? WHERE id = ?", row)

    def _counted(self, batch: Batch) -> Batch:
        """Return the batch with current counts: computed from its lines, or as stored in a batch that has ended."""
        if not batch.has_ended:
            batch.request_counts = self._counts(batch.id)
        return batch

    def _counts(self, batch_id: str) -> RequestCounts:
        query = "SELECT COUNT(*), SUM(status = 200), SUM(status <> 200) FROM lines WHERE batch = ?"
        return RequestCounts(*(count or 0 for count in self._db.execute(query, (batch_id,)).fetchone()))


def lock_of(path: Path) -> Path:
    whole = path.resolve()
    return whole.with_name(f"{whole.name}.lock")


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def new_file(file_id: str, filename: str, purpose: str, now: float) -> FileObject:
    created = int(now)
    return FileObject(
        id=file_id, bytes=0, created_at=created, expires_at=created + KEPT_S, filename=filename, purpose=purpose
    )


def _decoded(row: tuple[bytes] | None, kind: type[T], field: str) -> T:
    if row is None:
        raise RequestNotFoundError(field, f"must be the id of a stored {field.removesuffix('_id')}")
    return msgspec.json.decode(row[0], type=kind)


def _chunks(first: bytes, lines: Iterator[bytes]) -> Iterator[bytes]:
    chunk = bytearray(first)
    for line in lines:
        if len(chunk) >= CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
        chunk += line
    yield bytes(chunk)
