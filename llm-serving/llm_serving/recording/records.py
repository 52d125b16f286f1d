"""The form of a recording: what the scheduler was told and what it decided, as records sealed one to the next.

A file is `MAGIC`, a header, then records. A record is its length and the complement of that (two u32, little endian),
its payload (msgpack), and the seal: the running hash of everything from the header to here. The header holds the seal
that the file before it ended with, so the seals of all files of one run are one chain.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, BinaryIO, Final, NamedTuple

import msgspec

from llm_serving.core.kv_transfer import Transfer
from llm_serving.core.step import BlockMove
from llm_serving.errors import RecordingError
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.recording.upgrade import OLD_FORMAT
from llm_serving.scheduler.schedule import PromptResults

MAGIC: Final = b"llm-serving scheduler recording\n"
FORMAT: Final = 15
SEAL_BYTES: Final = 8
_LENGTH = struct.Struct("<II")
_COMPLEMENT: Final = 0xFFFFFFFF
MAX_RECORD_BYTES: Final = 2**30


class Header(msgspec.Struct, array_like=True, frozen=True, tag="header"):
    """Begins each file with all that determines the decisions from there on."""

    format: int
    version: str
    """Of the package that recorded."""
    name: str
    """Of the scheduler among those of one server."""
    seal: bytes
    """The last one of the file before; empty in the first."""
    layouts: dict[str, list[str]]
    nodes: list[Any]
    """With `layouts` the state, see `snapshot.py`."""


# Requests are called by `Request.sequence`, which the scheduler gives in order.


class Added(msgspec.Struct, array_like=True, frozen=True, tag="add"):
    """`add`: of the request, all that a decision can depend on."""

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
    """What it has come with from another replica."""
    num_cached_tokens: int
    first_scheduled_time: float | None


class Drafted(msgspec.Struct, array_like=True, frozen=True, tag="draft"):
    """`draft`: draft tokens of a request."""

    sequence: int
    token_ids: list[int]


class Asked(msgspec.Struct, array_like=True, frozen=True, tag="schedule"):
    """`schedule`; a `Decided` follows, unless it raised."""

    now: float


class Updated(msgspec.Struct, array_like=True, frozen=True, tag="update"):
    """`update` of the schedule of `step`."""

    step: int
    token_ids: list[int]
    time: float
    """When the reply was there; nothing is decided by it, profiles are made of it."""


class Paused(msgspec.Struct, array_like=True, frozen=True, tag="pause"):
    sequence: int


class Resumed(msgspec.Struct, array_like=True, frozen=True, tag="resume"):
    sequence: int
    newest_token_id: int
    """What its last token has become while it was paused."""


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="finish"):
    """`finish`, asked for from outside; what `update` ends follows from its tokens."""

    sequence: int
    reason: str


class Departed(msgspec.Struct, array_like=True, frozen=True, tag="depart"):
    """`depart`: its last step here has been replied to."""

    sequence: int


class GivenBack(msgspec.Struct, array_like=True, frozen=True, tag="give_back"):
    """`give_back`."""

    blocks: list[TransferBlock]


class Reprioritised(msgspec.Struct, array_like=True, frozen=True, tag="reprioritise"):
    sequence: int
    priority: int


class PutOff(msgspec.Struct, array_like=True, frozen=True, tag="put_off"):
    sequence: int
    deadline: float | None


class ServedElsewhere(msgspec.Struct, array_like=True, frozen=True, tag="served_elsewhere"):
    """What other replicas have served."""

    service: list[tuple[str, str, int]]
    """Class, tenant, tokens."""


class Dealt(msgspec.Struct, array_like=True, frozen=True, tag="deal"):
    """`deal`: places of tenants that all schedulers share."""

    places: dict[str, int]


class PutAhead(msgspec.Struct, array_like=True, frozen=True, tag="put_ahead"):
    """`put_ahead`: classes that have had more than their share of all schedulers."""

    names: list[str]


class Reloaded(msgspec.Struct, array_like=True, frozen=True, tag="reload"):
    """`reload`: the rules, as `Header` has the state."""

    layouts: dict[str, list[str]]
    nodes: list[Any]


class CacheLost(msgspec.Struct, array_like=True, frozen=True, tag="lose_cache"):
    pass


Row = tuple[int, int, int, int, int, list[int]]
"""Request, tokens in the cache before, tokens computed, tokens chosen, blocks of its table, the newest of these:
those that an earlier row of this file has not shown."""


class Decided(msgspec.Struct, array_like=True, frozen=True, tag="decision"):
    """What `schedule` returned."""

    step: int | None
    """None: no request could move; the rest is empty then."""
    rows: list[Row]
    block_moves: list[BlockMove]
    preempted: list[int]
    prompt_results: list[PromptResults]
    exports: list[BlockMove]


Event = (
    Added
    | Drafted
    | Asked
    | Updated
    | Paused
    | Resumed
    | Reprioritised
    | PutOff
    | Ended
    | Departed
    | GivenBack
    | ServedElsewhere
    | Dealt
    | PutAhead
    | Reloaded
    | CacheLost
)
Record = Header | Event | Decided

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Chain:
    """Frames payloads in order and seals each with the hash of all of them."""

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
        return b"".join((_LENGTH.pack(length, length ^ _COMPLEMENT), payload, self._hash.digest()))


class Entry(NamedTuple):
    """A record as it stands in a file."""

    number: int
    """From 0, the header."""
    offset: int
    """Bytes from the beginning of the file."""
    payload: bytes
    record: Record


class Reader:
    """The records of one file in order; stops at an incomplete last one, as a crash leaves it."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises RecordingError unless the file begins as a recording does."""
        self._file = file
        self._chain = Chain()
        self.torn_at: int | None = None
        """Where the last record begins, if it is not complete."""
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError("is not a recording of the scheduler")
        self._entries = self._read()
        first = next(self._entries, None)
        if first is None:
            raise RecordingError("ends before its header does; there is nothing to replay")
        if not isinstance(first.record, Header):
            raise RecordingError("does not begin with a header")
        if first.record.format not in (FORMAT, OLD_FORMAT):
            raise RecordingError(
                f"has format {first.record.format}; this version reads formats {OLD_FORMAT} and {FORMAT}"
            )
        self.header = first.record
        self.header_payload = first.payload

    def __iter__(self) -> Iterator[Entry]:
        """What follows the header. Raises RecordingError at a damaged record."""
        return self._entries

    def _read(self) -> Iterator[Entry]:
        number, offset = 0, len(MAGIC)
        while prefix := self._file.read(_LENGTH.size):
            length = self._length(prefix, number, offset)
            body = self._file.read(length + SEAL_BYTES)
            if len(prefix) < _LENGTH.size or len(body) < length + SEAL_BYTES:
                self.torn_at = offset
                return
            payload = body[:length]
            self._chain.add(payload)
            if body[length:] != self._chain.seal:
                raise _damaged(number, offset, "it, or one before it, is not what was written")
            try:
                record = _decode(payload)
            except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is invalid UTF-8
                raise _damaged(number, offset, str(error)) from None
            yield Entry(number, offset, payload, record)
            number, offset = number + 1, offset + _LENGTH.size + len(body)

    def _length(self, prefix: bytes, number: int, offset: int) -> int:
        if len(prefix) < _LENGTH.size:
            return 0
        length, complement = _LENGTH.unpack(prefix)
        if length ^ complement != _COMPLEMENT or length > MAX_RECORD_BYTES:
            raise _damaged(number, offset, "its length makes no sense")
        return int(length)


def _damaged(number: int, offset: int, why: str) -> RecordingError:
    return RecordingError(f"record {number} at byte {offset} is damaged: {why}")
