"""`TlsRecords` passes records to a fake of uvloop's `SSLProtocol`."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.server.http import tls
from llm_serving.server.http.tls import MAX_EMPTY_RECORDS, RECORDS_AT_ONCE, TlsRecords

EMPTY, DATA = b"k", b"d"
"""First bytes of records: whether they bring data."""


def record(kind=EMPTY, size=22):
    return b"\x17\x03\x03" + size.to_bytes(2) + kind.ljust(size)


class Connection:
    has_received = is_closed = False

    def is_closing(self):
        return self.is_closed


class Transport:
    aborted = False
    reading = True

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True


class FakeTls:
    """Notes the pieces that it gets, and reports data in the last piece of a record of data."""

    def __init__(self, loop, connection, *args, **options):
        self.connection, self.pieces, self.record = connection, [], b""
        self.buffer = bytearray(2**18)

    def connection_made(self, transport):
        self.transport = transport

    def _get_app_transport(self, context):
        return Transport.made

    def get_buffer(self, size):
        return memoryview(self.buffer)

    def buffer_updated(self, size):
        self.pieces.append(bytes(self.buffer[:size]))
        self.record += self.pieces[-1]
        if len(self.record) == 5 + int.from_bytes(self.record[3:5]):
            self.connection.has_received = self.record[5:6] == DATA and not self.connection.is_closing()
            self.record = b""


def receive(records, data):
    """Have the records receive data, as much at once as their buffer holds."""
    while data:
        buffer = records.get_buffer(2**16)
        size = min(len(buffer), len(data))
        buffer[:size] = data[:size]
        records.buffer_updated(size)
        data = data[size:]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(tls, "SSLProtocol", FakeTls)

    def run(test):
        async def main():
            connection, transport = Connection(), Transport()
            records = TlsRecords(connection, None, 1.0)
            Transport.made = transport
            records.connection_made(transport)
            await test(records, connection, transport, records._tls.pieces)

        asyncio.run(main())

    return run


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 7, 26, 27, 28, 100, 1000])
def test_records_are_passed_on_one_at_a_time(run, size):
    sent = [record(DATA, each) for each in (1, 22, 300, 2)]

    async def test(records, connection, transport, pieces):
        content = b"".join(sent)
        for begin in range(0, len(content), size):
            receive(records, content[begin : begin + size])
        assert b"".join(pieces) == content
        ends = {sum(map(len, sent[: number + 1])) for number in range(len(sent))}
        assert ends <= {sum(map(len, pieces[: number + 1])) for number in range(len(pieces))}
        assert transport.reading

    run(test)


def test_long_records_need_no_further_iterations(run):
    async def test(records, connection, transport, pieces):
        receive(records, record(DATA, 16_000) * 20)
        assert sum(map(len, pieces)) == 20 * 16_005
        assert transport.reading

    run(test)


def test_few_records_are_decrypted_in_an_iteration(run):
    async def test(records, connection, transport, pieces):
        receive(records, record(DATA) * (2 * RECORDS_AT_ONCE + 1))
        counts = []
        while not transport.reading:
            counts.append(len(pieces))
            await asyncio.sleep(0)
        assert [*counts, len(pieces)] == [RECORDS_AT_ONCE, 2 * RECORDS_AT_ONCE, 2 * RECORDS_AT_ONCE + 1]

    run(test)


def test_records_without_data_are_counted_through_the_life_of_a_connection(run):
    async def test(records, connection, transport, pieces):
        for _ in range(MAX_EMPTY_RECORDS):
            receive(records, record(EMPTY, 16_000) + record(DATA))
        assert not transport.aborted
        receive(records, record(EMPTY, 16_000) + record(DATA))
        assert transport.aborted
        assert len(pieces) == 2 * MAX_EMPTY_RECORDS + 1, "nothing is decrypted after the end"

    run(test)


def test_records_wait_while_reading_is_paused(run):
    async def test(records, connection, transport, pieces):
        records.pause_reading()
        receive(records, record() * (MAX_EMPTY_RECORDS + 1))
        await asyncio.sleep(0)
        assert not pieces
        assert not transport.reading
        records.resume_reading()
        while not transport.aborted:
            await asyncio.sleep(0)
        assert len(pieces) == MAX_EMPTY_RECORDS + 1

    run(test)


def test_closing_connection_drops_records_beyond_the_limit(run):
    """The client can still read the response to a request whose body it continues to send."""

    async def test(records, connection, transport, pieces):
        connection.is_closed = True
        receive(records, record(DATA) * (3 * MAX_EMPTY_RECORDS))
        while not transport.reading:
            await asyncio.sleep(0)
        receive(records, record(DATA)[:7])
        assert not transport.aborted
        assert len(pieces) == MAX_EMPTY_RECORDS + 1

    run(test)
