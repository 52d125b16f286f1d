"""The format of a recording: the scheduler's calls and decisions as a chain of sealed records.

A file consists of `MAGIC`, a header and records. A record consists of its length and the complement of the length (two
u32, little endian), its payload (msgpack), and the seal, which is the running hash of all payloads from the header to
this one. The header has the last seal of the previous file, so the seals of all files of one run form a chain.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Any, Final

import msgspec

from llm_serving.core.request import DiskPrefix, Request, Transfer
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.core.step import BlockMove
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.scheduler.schedule import PromptResults

MAGIC: Final = b"llm-serving scheduler recording\n"
FORMAT: Final = 18
SEAL_BYTES: Final = 8
LENGTH: Final = struct.Struct("<II")
COMPLEMENT: Final = 0xFFFFFFFF


class Header(msgspec.Struct, array_like=True, frozen=True, tag="header"):
    """The first record of a file, with the state that determines all later decisions."""

    format: int
    version: str
    name: str
    seal: bytes
    layouts: dict[str, list[str]]
    nodes: list[Any]
    """The scheduler's state, together with `layouts` (see `snapshot.py`)."""


# Records identify requests by `Request.sequence`, which the scheduler assigns in order. Tags are part of the format.


class Added(msgspec.Struct, array_like=True, frozen=True, tag="add"):
    """A call of `Scheduler.add`, with the fields of the request that affect decisions."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    max_tokens: int
    stop_token_ids: list[int]
    priority: int
    tenant: str
    cache_salt: str
    fork_of: str | None
    needs_known_output: bool
    is_beam: bool
    num_prompt_logprobs_wanted: int
    wants_vector: bool
    arrival_time: float
    deadline: float | None
    last_scheduled_step: int
    wants_migration: bool
    transfer: Transfer | None
    num_cached_tokens: int
    first_scheduled_time: float | None
    disk_prefix: DiskPrefix | None = None
    adapter: int = 0

    @classmethod
    def of(cls, request: Request) -> Added:
        same = {name: getattr(request, name) for name in _SAME_IN_REQUEST}
        return cls(max_tokens=request.sampling.max_tokens, stop_token_ids=sorted(request.stop_token_ids), **same)

    def request(self) -> Request:
        same = {name: getattr(self, name) for name in _SAME_IN_REQUEST}
        sampling, stop_token_ids = SamplingParams(max_tokens=self.max_tokens), frozenset(self.stop_token_ids)
        return Request(sampling=sampling, stop_token_ids=stop_token_ids, **same)


_SAME_IN_REQUEST: Final = [name for name in Added.__struct_fields__ if name not in ("max_tokens", "stop_token_ids")]


class Drafted(msgspec.Struct, array_like=True, frozen=True, tag="draft"):
    sequence: int
    token_ids: list[int]


class ScheduleCalled(msgspec.Struct, array_like=True, frozen=True, tag="schedule"):
    """A call of `Scheduler.schedule`. A `Decided` record follows, unless the call raised an error."""

    now: float


class Updated(msgspec.Struct, array_like=True, frozen=True, tag="update"):
    step: int
    token_ids: list[int]
    time: float
    """Arrival of the reply, in seconds on the engine's clock. The simulator reads it; decisions do not depend on it."""


class Paused(msgspec.Struct, array_like=True, frozen=True, tag="pause"):
    sequence: int


class Resumed(msgspec.Struct, array_like=True, frozen=True, tag="resume"):
    sequence: int
    newest_token_id: int
    """Id of the request's last token. It may have changed while the request was paused."""


class RequestFinished(msgspec.Struct, array_like=True, frozen=True, tag="finish"):
    """A call of `Scheduler.finish` by the engine. Requests that finish in `update` are not recorded."""

    sequence: int
    reason: str


class MigratedOut(msgspec.Struct, array_like=True, frozen=True, tag="depart"):
    sequence: int


class BlocksReclaimed(msgspec.Struct, array_like=True, frozen=True, tag="give_back"):
    blocks: list[TransferBlock]


class PriorityChanged(msgspec.Struct, array_like=True, frozen=True, tag="reprioritise"):
    sequence: int
    priority: int


class DeadlineChanged(msgspec.Struct, array_like=True, frozen=True, tag="put_off"):
    sequence: int
    deadline: float | None


class RemoteServiceCharged(msgspec.Struct, array_like=True, frozen=True, tag="served_elsewhere"):
    service: list[tuple[str, str, int]]
    """(class, tenant, number of virtual tokens)."""


class TenantLeasesAdjusted(msgspec.Struct, array_like=True, frozen=True, tag="deal"):
    leases: dict[str, int]


class ClassesDeprioritized(msgspec.Struct, array_like=True, frozen=True, tag="put_ahead"):
    classes: list[str]


class Reloaded(msgspec.Struct, array_like=True, frozen=True, tag="reload"):
    """A call of `Scheduler.reload`. `layouts` and `nodes` hold its rules, as `snapshot.capture` returns them."""

    layouts: dict[str, list[str]]
    nodes: list[Any]


class CacheReset(msgspec.Struct, array_like=True, frozen=True, tag="lose_cache"):
    pass


class Noted(msgspec.Struct, array_like=True, frozen=True, tag="note"):
    """An event outside the scheduler, such as sleep of the model or a replacement of its weights."""

    text: str


Row = tuple[int, int, int, int, int, list[int]]
"""(sequence, tokens in the cache, tokens computed, tokens sampled, blocks of the request, ids of its new blocks)."""


class Decided(msgspec.Struct, array_like=True, frozen=True, tag="decision"):
    step: int | None
    """Number of the step. None if no request could be computed; the other fields are then empty."""
    rows: list[Row]
    block_moves: list[BlockMove]
    preempted: list[int]
    prompt_results: list[PromptResults]
    exports: list[BlockMove]


Event = (
    Added
    | Drafted
    | ScheduleCalled
    | Updated
    | Paused
    | Resumed
    | PriorityChanged
    | DeadlineChanged
    | RequestFinished
    | MigratedOut
    | BlocksReclaimed
    | RemoteServiceCharged
    | TenantLeasesAdjusted
    | ClassesDeprioritized
    | Reloaded
    | CacheReset
    | Noted
)
Record = Header | Event | Decided

encode = msgspec.msgpack.Encoder().encode


class Chain:
    """Writes payloads as records in order, each with the hash of all payloads so far."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=SEAL_BYTES)

    @property
    def seal(self) -> bytes:
        return self._hash.digest()

    def add(self, payload: bytes) -> None:
        self._hash.update(payload)

    def frame(self, payload: bytes) -> bytes:
        self._hash.update(payload)
        length = len(payload)
        return b"".join((LENGTH.pack(length, length ^ COMPLEMENT), payload, self._hash.digest()))
