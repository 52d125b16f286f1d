"""The store of accepted requests, found by stream or key. The oldest are dropped for lack of memory or by age."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from llm_serving.config.output_settings import output_settings
from llm_serving.config.schema import ServingConfig
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import IdempotencyError, RequestNotFoundError
from llm_serving.server.tenant_quota import StoredSizes, TenantQuota

OVERHEAD_BYTES: Final = 1024
"""Estimated bytes of a record without the request and its names."""


class AcceptedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A request of completions or chat, with everything needed to compute its response again."""

    stream_id: str
    """Id of the stream. It is random, so that no other client can predict it."""
    route: str
    tenant: str
    key: str
    """The `Idempotency-Key`; empty: there is none."""
    digest: bytes
    request: bytes
    seed: int
    seeded: bool
    streams: bool
    """Whether its response is a stream that can be resumed."""
    request_id: str
    created: int
    """Seconds since the epoch, as in the response."""
    model: bytes
    """Digest of what the response depends on: the model, its configuration and kernels."""
    prompts: bytes
    accepted_at: float

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.request) + len(self.key) + len(self.tenant) + len(self.request_id)


class Log(Protocol):
    """The log of accepted requests; see `LogFile`."""

    async def append(self, record: AcceptedRequest) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """The exclusive right of one request to a key. Other requests with the key wait."""

    name: tuple[str, str]
    digest: bytes
    settled: asyncio.Future[None]


class AcceptedRequests:
    """The accepted requests that clients may repeat. Only the event loop may use it.

    Args:
        quota: Memory for the records; with 0 bytes no record is kept.
        max_age_s: Seconds from a request's acceptance until its record expires.
        wall_clock: Returns seconds since the epoch, for the age of records that come from a log.
        clock: Returns monotonic seconds, by which records expire.
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
        self.log: Log | None = None

    def __len__(self) -> int:
        return len(self._records)

    def peek(self, stream_id: str) -> AcceptedRequest | None:
        """Return the record of a stream, of any tenant; None: there is none."""
        return self._records.get(stream_id)

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._sizes.num_bytes

    def find(self, field: str, stream_id: str, tenant: str | None) -> AcceptedRequest:
        """Return the request of a stream that can be resumed. Raise RequestNotFoundError if the tenant has none."""
        self._expire()
        record = self._records.get(stream_id)
        if record is None or not record.streams or tenant not in (None, record.tenant):
            raise RequestNotFoundError(field, "must be the id of a stream whose request is still stored")
        return record

    async def claim(self, tenant: str, key: str, digest: bytes) -> AcceptedRequest | Claim:
        """Return the accepted request of a key, or a claim, whose owner holds the key until it calls `settle`.

        Wait while another request claims the key. Raise IdempotencyError if the key belongs to a different request.
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
        """Store a record as `restore` does. If it is stored and there is a log, log it too."""
        self.restore(record)
        if self.log is not None and record.stream_id in self._records:
            await self.log.append(record)

    def restore(self, record: AcceptedRequest) -> None:
        """Store a record, unless it is too old or too large. If memory is full, evict records as `StoredSizes` does."""
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
    """The model's configuration, and the sizes and times of its files, when the server started."""

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
        """Return a digest that is equal only for models, adapters and configurations that give the same responses.

        `adapter`: number of the request's adapter; 0: none.
        """
        state = self._state + msgspec.msgpack.encode((compute_fingerprint, max_model_len, max_input_len, adapter))
        return hashlib.blake2b(state, digest_size=16).digest()
