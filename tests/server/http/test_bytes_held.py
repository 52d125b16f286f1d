"""Buffered bytes of connections are counted, and memory does not grow with received bytes."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from llm_serving.server.http.connection import TLS_BYTES, WRITE_BUFFER_BYTES
from llm_serving.server.http.request import REQUEST_KEY
from support.connection_harness import CHUNKED, GET, Transport, connected, settle

READ_BYTES = 64 * 1024


def test_body_counts_as_buffered_until_it_is_read():
    async def run():
        async with connected() as (server, connection, _):
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + b"x" * 3000)
            await settle()
            assert server.registry.num_bytes == 3000
            server.app.gate.clear()
            connection.data_received(b"x" * 2000)
            await settle()
            assert server.registry.num_bytes == 0

    asyncio.run(run())


def test_largest_incomplete_request_is_refused_at_the_limit():
    async def run():
        async with connected(max_buffered_bytes=10_000) as (server, connection, transport):
            other, others_transport = server.connect()
            head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n"
            connection.data_received(head + b"x" * 6000)
            other.data_received(head + b"x" * 3000)
            await settle()
            assert transport.statuses == []
            other.data_received(b"x" * 2000)
            await settle()
            assert transport.statuses == [503]
            assert not transport.aborted
            assert b"\r\nretry-after: " in transport.written
            assert others_transport.statuses == []
            assert server.app.left == ["/"]
            other.connection_lost(None)

    asyncio.run(run())


def test_tls_buffers_count_as_buffered():
    async def run():
        async with connected() as (server, connection, _):
            connection.connection_lost(None)
            connection = server.connection()
            connection.connection_made(Transport(sslcontext=object()))
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + b"x" * 3000)
            assert server.registry.num_bytes == 3000 + TLS_BYTES
            connection.data_received(b"x" * 2000)
            await settle()
            assert server.registry.num_bytes == 0
            connection.connection_lost(None)

    asyncio.run(run())


def test_unread_response_counts_as_buffered():
    async def run():
        async with connected(max_buffered_bytes=10_000) as (server, connection, transport):
            transport.unsent = 9000
            connection.pause_writing()
            assert server.registry.num_bytes == 9000
            connection.resume_writing()
            assert server.registry.num_bytes == 0
            transport.unsent = 11_000
            connection.pause_writing()
            assert transport.aborted

    asyncio.run(run())


def test_pending_stream_chunks_count_as_buffered():
    """An engine generates chunks at the same speed for a client that does not read them."""

    async def run():
        async with connected(max_buffered_bytes=100_000) as (server, connection, transport):
            server.app.gate.clear()
            connection.data_received(GET % 1)
            await settle()
            note_unsent = server.app.scope[REQUEST_KEY].add_unsent
            note_unsent(200_000)
            assert server.registry.num_bytes == 0, "it is for the loop to write them"
            note_unsent(-150_000)
            transport.unsent = 9000
            connection.pause_writing()
            assert server.registry.num_bytes == 59_000
            note_unsent(-45_000)
            assert server.registry.num_bytes == 14_000
            connection.resume_writing()
            assert server.registry.num_bytes == 0
            connection.pause_writing()
            note_unsent(90_000)
            assert transport.aborted

    asyncio.run(run())


def test_response_pauses_for_a_slow_reader():
    async def run():
        async with connected() as (_, _, transport):
            assert transport.high == WRITE_BUFFER_BYTES

    asyncio.run(run())


FLOODS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"X-Aaaaaa: bbbbbb\r\n"),
    "one header": (b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"a"),
    "url": (b"GET /", b"a"),
    "trailers": (CHUNKED[:-9] % 1, b"X-Aaaaaa: bbbbbb\r\n"),
    "one trailer": (CHUNKED[:-9] % 1 + b"X: ", b"a"),
    "chunk extension": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;e=", b"a"),
    "chunks of one byte": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
    "requests": (b"", GET % 1),
    "empty lines": (b"", b"\r\n"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_memory_is_independent_of_received_bytes(name):
    begin, unit = FLOODS[name]
    piece = unit * (READ_BYTES // len(unit))

    async def run():
        async with connected() as (server, connection, transport):
            server.app.gate.clear()
            connection.data_received(begin + piece)  # the first answer and its objects are not counted
            await settle()
            tracemalloc.start()
            for _ in range(100):
                if transport.reading and not transport.is_closing():
                    connection.data_received(piece)
                await asyncio.sleep(0)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

    assert asyncio.run(run()) < 500_000
