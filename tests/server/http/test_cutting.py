"""Requests are independent of how their bytes are received."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.connection_harness import CHUNKED, DECLARED, GET, connected, settle


@settings(max_examples=60)
@given(st.data())
def test_responses_are_independent_of_received_pieces(data):
    kinds = data.draw(st.lists(st.sampled_from([GET, DECLARED, CHUNKED]), min_size=1, max_size=6))
    stream = b"".join(kind % number for number, kind in enumerate(kinds))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=40)))
    wait = data.draw(st.booleans())

    async def run():
        async with connected() as (_server, connection, transport):
            for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                if begin < end:
                    connection.data_received(stream[begin:end])
                if wait:
                    await settle()
            while len(transport.statuses) < len(kinds):
                await asyncio.sleep(0)
            bodies = {GET: b"", DECLARED: b"a\n\r\nb\r\n\r\ncd!", CHUNKED: b"a\n\r\nb\r\n\r\ncd!"}
            answers = [b"/%d=%s;" % (number, bodies[kind]) for number, kind in enumerate(kinds)]
            places = [transport.written.find(answer) for answer in answers]
            assert places == sorted(places)
            assert -1 not in places
            assert not transport.is_closing()

    asyncio.run(run())


def test_requests_arrive_byte_by_byte():
    async def run():
        async with connected() as (server, connection, transport):
            for byte in GET % 1 + CHUNKED % 2 + DECLARED % 3:
                connection.data_received(bytes([byte]))
                await settle()
            assert server.app.paths == ["/1", "/2", "/3"]
            assert transport.statuses == [200, 200, 200]

    asyncio.run(run())


def test_empty_lines_before_a_request_are_ignored():
    async def run():
        async with connected() as (_server, connection, transport):
            for _ in range(3):
                connection.data_received(b"\r\n\r\n\n" + GET % 1)
                await settle()
            assert transport.statuses == [200] * 3

    asyncio.run(run())


@pytest.mark.parametrize("request_", [GET % 0, DECLARED % 0, CHUNKED % 0])
def test_upgrade_header_is_ignored(request_):
    """Java's client asks for HTTP/2 with every request, also with a body."""
    line, rest = request_.split(b"\r\n", 1)
    asking = b"\r\n".join(
        [line, b"Connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"HTTP2-Settings: AAMA", rest]
    )

    async def run():
        async with connected() as (_server, connection, transport):
            connection.data_received(asking + GET % 1)
            await settle()
            await settle()
            body = b"" if request_.startswith(b"GET") else b"a\n\r\nb\r\n\r\ncd!"
            assert transport.statuses == [200, 200]
            assert b"/0=" + body + b";" in transport.written
            assert not transport.closed

    asyncio.run(run())
