"""Accepted requests by stream and key: the newest, up to a number of bytes and an age.

A record has all that is needed to compute the same response again. `ModelState` identifies the model, configuration
and kernels without reading the weights.
"""

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
"""What a record takes beside the request and its names."""


class AcceptedRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A request of completions or conversations with all that the server added to it."""

    stream_id: str
    """Random, so that it cannot be predicted."""
    route: str
    tenant: str
    key: str
    """Its Idempotency-Key; empty: it has none."""
    digest: bytes
    """Of the request as it was sent."""
    request: bytes
    """The request as JSON, with its seed."""
    seed: int
    seeded: bool
    """Whether the client gave the seed."""
    streams: bool
    """Whether its answer is a stream that can be resumed."""
    request_id: str
    created: int
    """Seconds since 1970, as answers tell it."""
    model: bytes
    """Of the model, its configuration and what computes: another one gives other answers."""
    prompts: bytes
    """Digest of the token ids of its prompts."""
    accepted_at: float
    """Seconds since 1970."""

    @property
    def num_bytes(self) -> int:
        return OVERHEAD_BYTES + len(self.request) + len(self.key) + len(self.tenant) + len(self.request_id)


class Log(Protocol):
    """Where records go that shall outlive this process."""

    async def append(self, record: AcceptedRequest) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class Claim:
    """That one request has a key; others that come by it wait."""

    name: tuple[str, str]
    """Tenant and key."""
    digest: bytes
    settled: asyncio.Future[None]


class AcceptedRequests:
    """It belongs to the event loop.

    Args:
        shares: Of all records; none is kept where there are no bytes for them.
        kept_s: Seconds from a request's acceptance for which it is known.
        wall_clock: Seconds since 1970: tells how old a request is that comes from a log.
        clock: Tells how old it becomes, however the other one is set meanwhile.
    """

    def __init__(
        self, shares: TenantQuota, kept_s: float, wall_clock: Callable[[], float], clock: Clock = monotonic
    ) -> None:
        self._max_bytes = shares.num_bytes
        self._kept_s = kept_s
        self._wall_clock = wall_clock
        self._clock = clock
        self._kept = StoredSizes(shares)
        self._records: dict[str, AcceptedRequest] = {}
        """By stream, oldest first."""
        self._known_until: dict[str, float] = {}
        """The same, on `clock`."""
        self._by_key: dict[tuple[str, str], AcceptedRequest] = {}
        self._claims: dict[tuple[str, str], Claim] = {}
        self.log: Log | None = None

    def __len__(self) -> int:
        return len(self._records)

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        return self._kept.num_bytes

    def find(self, field: str, stream_id: str, tenant: str | None) -> AcceptedRequest:
        """The request of a stream that can be resumed.

        Args:
            field: Which named it.
            stream_id: The stream.
            tenant: Who asks; None: keys are not needed, and who knows the id may.

        Raises:
            RequestNotFoundError: There is none, or it is another tenant's.
        """
        self._expire()
        record = self._records.get(stream_id)
        if record is None or not record.streams or tenant not in (None, record.tenant):
            raise RequestNotFoundError(field, "must be that of a stream whose request is still known")
        return record

    async def claim(self, tenant: str, key: str, digest: bytes) -> AcceptedRequest | Claim:
        """The request that came by this key before; waits for one that is on its way, into the log as well.

        Returns:
            A claim where there is none: whoever asked has the key until it calls `settle`.

        Raises:
            IdempotencyError: It was another request.
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
        """Whoever claimed a key has added its request, or it was refused, and the next one may; twice is as once."""
        if self._claims.get(claim.name) is claim:
            del self._claims[claim.name]
            claim.settled.set_result(None)

    async def add(self, record: AcceptedRequest) -> None:
        """Keeps a request, also beyond this process where there is a log; older ones make room, of several tenants
        those of whoever has most."""
        self.restore(record)
        if self.log is not None and record.stream_id in self._records:
            await self.log.append(record)

    def restore(self, record: AcceptedRequest) -> None:
        """Keeps a request that may come from a log."""
        age_s = max(0.0, self._wall_clock() - record.accepted_at)
        if record.stream_id in self._records or age_s > self._kept_s:
            return
        self._expire()
        older = self._kept.evictions(record.tenant, record.num_bytes)
        if older is None:
            return
        for stream_id in older:
            self._forget(self._records[stream_id])
        self._records[record.stream_id] = record
        self._kept.add(record.stream_id, record.tenant, record.num_bytes)
        self._known_until[record.stream_id] = self._clock() + self._kept_s - age_s
        if record.key:
            self._by_key[record.tenant, record.key] = record

    def _expire(self) -> None:
        now = self._clock()
        while (oldest := next(iter(self._records.values()), None)) and self._known_until[oldest.stream_id] < now:
            self._forget(oldest)

    def _forget(self, record: AcceptedRequest) -> None:
        del self._records[record.stream_id], self._known_until[record.stream_id]
        self._kept.remove(record.stream_id)
        if self._by_key.get((record.tenant, record.key)) is record:
            del self._by_key[record.tenant, record.key]


def _check(key: str, known: bytes, digest: bytes) -> None:
    if not hmac.compare_digest(known, digest):
        raise IdempotencyError("Idempotency-Key", "must be a new one for another request", key)


class ModelState:
    """The state of the model's folder when the server started."""

    def __init__(self, config: ServingConfig) -> None:
        model = config.model
        named = (model.model_path, model.tokenizer_path, model.mindir_path, model.mindir_ini)
        folders = [each for each in named if each is not None]
        files: list[Any] = []
        for folder in folders:
            for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
                try:
                    found = path.stat()
                except OSError:  # a link to nowhere
                    continue
                files.append((path.name, found.st_size, found.st_mtime_ns))
        facts = (files, sorted(output_settings(config).items()), model.generation_config, model.end_token)
        self._facts = msgspec.msgpack.encode(facts)

    def digest(self, compute_fingerprint: ComputeFingerprint, max_model_len: int, max_input_len: int) -> bytes:
        """The same only for what gives the same answers."""
        facts = self._facts + msgspec.msgpack.encode((compute_fingerprint, max_model_len, max_input_len))
        return hashlib.blake2b(facts, digest_size=16).digest()
