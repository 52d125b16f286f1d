"""Bodies of unknown length, and bodies that the application does not read."""

from __future__ import annotations

import asyncio

from support.connection_harness import connected, settle

HEAD = b"POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
DECLARED = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n"


def test_chunked_body_with_line_ends_arrives_complete():
    async def run():
        async with connected() as (_, connection, transport):
            body = b"\n\r\n" * 20_000
            connection.data_received(HEAD + b"%x\r\n" % len(body))
            connection.data_received(body[:50_000])
            await settle()
            assert transport.statuses == []
            connection.data_received(body[50_000:] + b"\r\n0\r\n\r\n")
            while not transport.statuses:
                await asyncio.sleep(0)
            assert transport.written.endswith(b"/1=" + body + b";")

    asyncio.run(run())


def test_thousands_of_one_byte_chunks_are_refused():
    async def run():
        async with connected() as (_, connection, transport):
            connection.data_received(HEAD)
            connection.data_received(b"1\r\na\r\n" * 6000)
            await settle()
            assert transport.statuses == []
            connection.data_received(b"1\r\na\r\n" * 2000)
            await settle()
            assert transport.statuses == [431]

    asyncio.run(run())


def test_unread_chunked_body_is_not_received():
    async def run():
        async with connected() as (server, connection, transport):
            server.app.reads = False
            server.app.gate.clear()
            connection.data_received(DECLARED + b"x" * 1000)
            connection.data_received(b"x" * 100_000)
            await settle()
            assert not transport.reading
            server.app.gate.set()  # the rest of the body is dropped
            while not transport.reading:
                await asyncio.sleep(0)
            assert transport.statuses == [200]

    asyncio.run(run())


def test_chunked_body_is_received_as_it_is_read():
    async def run():
        async with connected() as (_, connection, transport):
            connection.data_received(DECLARED)
            for _ in range(10):
                connection.data_received(b"x" * 99_000)
                await settle()
                assert transport.reading

    asyncio.run(run())
