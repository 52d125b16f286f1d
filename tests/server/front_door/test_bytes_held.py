"""What waits in connections weighs, and does not grow with what is sent."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from llm_serving.server.front_door.connection import READ_BYTES, TLS_BYTES, UNSENT_KEY, WRITE_BUFFER_BYTES
from support.door_harness import CHUNKED, GET, door, settle


def test_a_body_weighs_until_the_application_has_it():
    async def run():
        async with door() as (house, connection, _):
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + b"x" * 3000)
            await settle()
            assert house.guests.num_bytes == 3000
            house.app.gate.clear()
            connection.data_received(b"x" * 2000)
            await settle()
            assert house.guests.num_bytes == 0

    asyncio.run(run())


def test_the_largest_unfinished_request_is_refused_when_there_is_too_much():
    async def run():
        async with door(max_buffered_bytes=10_000) as (house, connection, transport):
            other, others_transport = house.connect()
            head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 50000\r\n\r\n"
            connection.data_received(head + b"x" * 6000)
            other.data_received(head + b"x" * 3000)
            await settle()
            assert transport.statuses == []
            other.data_received(b"x" * 2000)
            await settle()
            assert transport.statuses == [503]
            assert b"\r\nretry-after: 1\r\n" in transport.written
            assert others_transport.statuses == []
            assert house.app.left == ["/"]
            other.connection_lost(None)

    asyncio.run(run())


def test_with_tls_its_buffers_weigh_too():
    async def run():
        async with door() as (house, connection, _):
            connection.scheme = "https"
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + b"x" * 3000)
            assert house.guests.num_bytes == 3000 + TLS_BYTES
            connection.data_received(b"x" * 2000)
            await settle()
            assert house.guests.num_bytes == 0

    asyncio.run(run())


def test_what_a_slow_reader_leaves_weighs_too():
    async def run():
        async with door(max_buffered_bytes=10_000) as (house, connection, transport):
            transport.unsent = 9000
            connection.pause_writing()
            assert house.guests.num_bytes == 9000
            connection.resume_writing()
            assert house.guests.num_bytes == 0
            transport.unsent = 11_000
            connection.pause_writing()
            assert transport.aborted

    asyncio.run(run())


def test_what_is_made_for_a_slow_reader_weighs_too():
    """An engine makes pieces of a stream as fast for whoever does not read them."""

    async def run():
        async with door(max_buffered_bytes=100_000) as (house, connection, transport):
            house.app.gate.clear()
            connection.data_received(GET % 1)
            await settle()
            note_unsent = connection.scope[UNSENT_KEY]
            note_unsent(200_000)
            assert house.guests.num_bytes == 0, "it is for the loop to write them"
            note_unsent(-150_000)
            transport.unsent = 9000
            connection.pause_writing()
            assert house.guests.num_bytes == 59_000
            note_unsent(-45_000)
            assert house.guests.num_bytes == 14_000
            connection.resume_writing()
            assert house.guests.num_bytes == 0
            connection.pause_writing()
            note_unsent(90_000)
            assert transport.aborted

    asyncio.run(run())


def test_an_answer_waits_when_so_much_is_not_taken():
    async def run():
        async with door() as (_, _, transport):
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
def test_memory_does_not_grow_with_what_is_sent(name):
    begin, unit = FLOODS[name]
    piece = unit * (READ_BYTES // len(unit))

    async def run():
        async with door() as (house, connection, transport):
            house.app.gate.clear()
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
