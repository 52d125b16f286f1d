"""Reads the records of a recording and checks their seals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

import msgspec
from llm_serving.errors import RecordingError
from llm_serving.recording.records import COMPLEMENT, FORMAT, LENGTH, MAGIC, SEAL_BYTES, Chain, Header, Record

from llm_serving_tools.recordings.upgrade import OLD_FORMATS

MAX_RECORD_BYTES: Final = 2**30
_decode = msgspec.msgpack.Decoder(Record).decode


class Entry(NamedTuple):
    number: int
    offset: int
    payload: bytes
    record: Record


class Reader:
    """Reads a recording's records except an incomplete last one. Raise RecordingError for a damaged or unknown file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._chain = Chain()
        self.torn_at: int | None = None
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError("is not a recording of the scheduler")
        self._entries = self._read()
        first = next(self._entries, None)
        if first is None:
            raise RecordingError("ends within its header, so there is nothing to replay")
        if not isinstance(first.record, Header):
            raise RecordingError("does not begin with a header")
        if first.record.format not in (FORMAT, *OLD_FORMATS):
            readable = ", ".join(map(str, (*OLD_FORMATS, FORMAT)))
            raise RecordingError(f"has format {first.record.format}; this version reads formats {readable}")
        self.header = first.record
        self.header_payload = first.payload

    def __iter__(self) -> Iterator[Entry]:
        return self._entries

    def _read(self) -> Iterator[Entry]:
        number, offset = 0, len(MAGIC)
        while prefix := self._file.read(LENGTH.size):
            length = self._length(prefix, number, offset)
            body = self._file.read(length + SEAL_BYTES)
            if len(prefix) < LENGTH.size or len(body) < length + SEAL_BYTES:
                self.torn_at = offset
                return
            payload = body[:length]
            self._chain.add(payload)
            if body[length:] != self._chain.seal:
                raise _damaged(number, offset, "its hash or the hash of an earlier record does not match")
            try:
                record = _decode(payload)
            except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors, as is invalid UTF-8
                raise _damaged(number, offset, str(error)) from None
            yield Entry(number, offset, payload, record)
            number, offset = number + 1, offset + LENGTH.size + len(body)

    def _length(self, prefix: bytes, number: int, offset: int) -> int:
        if len(prefix) < LENGTH.size:
            return 0
        length, complement = LENGTH.unpack(prefix)
        if length ^ complement != COMPLEMENT or length > MAX_RECORD_BYTES:
            raise _damaged(number, offset, "its length is invalid")
        return int(length)


def _damaged(number: int, offset: int, why: str) -> RecordingError:
    return RecordingError(f"record {number} at byte {offset} is damaged: {why}")
