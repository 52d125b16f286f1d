"""The end of a request's body is unambiguous for every reader."""

from __future__ import annotations

import asyncio

import pytest
from support.connection_harness import connected, settle

POST = b"POST /1 HTTP/1.1\r\nHost: a\r\n"
CHUNKS = b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


def answered(*pieces):
    """Return the statuses, the written bytes, and the requested paths."""

    async def run():
        async with connected() as (server, connection, transport):
            for piece in pieces:
                connection.data_received(piece)
            await settle()
            return transport.statuses, transport.written, server.app.paths

    return asyncio.run(run())


@pytest.mark.parametrize("digits", [20, 21, 4301, 20_000])
def test_content_length_of_many_digits_is_refused(digits):
    """Python converts no more than 4,300 of them."""
    statuses, written, paths = answered(POST + b"Content-Length: " + b"4".zfill(digits) + b"\r\n\r\nbody")
    if digits == 20:
        assert (statuses, paths) == ([200], ["/1"])
    else:
        assert (statuses, paths) == ([400], [])
        assert b"`Content-Length` must have at most 20 digits" in written


@pytest.mark.parametrize(
    "value", [b"gzip, chunked", b"identity", b"xchunked", b'"chunked"', b"chunked;q=1", b",chunked"]
)
def test_other_transfer_encodings_are_refused(value):
    """What follows would be a body to one reader and a request to another."""
    statuses, written, paths = answered(POST + b"Transfer-Encoding: " + value + CHUNKS)
    assert (statuses, paths) == ([501], [])
    assert b"`Transfer-Encoding` must be chunked" in written


def test_transfer_encoding_is_case_insensitive():
    assert answered(POST + b"Transfer-Encoding: ChunKed" + CHUNKS)[0] == [200]


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, gzip",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding:\r\nContent-Length: 4",
        b"Content-Length: 4\r\nContent-Length: 4",
        *(b"Content-Length: " + value for value in (b"4, 4", b"+4", b"-1", b"0x4", b"1_0", b"", b"\x0b4", b"9" * 20)),
        b"Content-Length : 4",
        b"X: a\r\n Content-Length: 4",
        b"X: a\rContent-Length: 4",
        b"X: a\nContent-Length: 4",
        b"X: a\0",
    ],
)
@pytest.mark.parametrize("step", [1, 10_000])
def test_ambiguous_request_head_is_refused(head, step):
    data = POST + head + b"\r\n\r\n0\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n"
    statuses, _, paths = answered(*(data[i : i + step] for i in range(0, len(data), step)))
    assert (statuses, paths) == ([400], [])


@pytest.mark.parametrize(
    "body",
    [
        *(b"%b\r\nabc\r\n0\r\n\r\n" % size for size in (b"3 ", b" 3", b"0x3", b"+3", b"-3", b"1" + b"0" * 15 + b"3")),
        b"3\nabc\n0\n\n",
        b"3;a\nabc\r\n0\r\n\r\n",
        b"3;a\rb\r\nabc\r\n0\r\n\r\n",
        b'3;a="x\r\nabc\r\n0\r\n\r\n',
        b"3\r\nabcXX0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"0\n\r\n",
        b"0\r\nA: b\n\n",
    ],
)
@pytest.mark.parametrize("step", [1, 10_000])
def test_no_response_follows_invalid_chunks(body, step):
    data = POST + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"GET /2 HTTP/1.1\r\nHost: a\r\n\r\n"
    statuses, _, paths = answered(*(data[i : i + step] for i in range(0, len(data), step)))
    assert (statuses, paths) == ([400], ["/1"])


@pytest.mark.parametrize("expects", [True, False])
def test_connection_closes_without_100_continue(expects):
    """The client may omit the body, and its next request would be read as one."""

    async def run():
        async with connected() as (server, connection, transport):
            server.app.reads = False
            expect = b"Expect: 100-continue\r\n" if expects else b""
            connection.data_received(POST + expect + b"Content-Length: 200\r\n\r\n")
            await settle()
            assert transport.statuses == [200]
            assert (b"\r\nconnection: close\r\n" in transport.written) == expects
            assert (transport.closed or transport.eof) == expects

    asyncio.run(run())


@pytest.mark.parametrize("sent", [b"", b"bo"])
def test_connection_continues_after_100_continue(sent):
    async def run():
        async with connected() as (server, connection, transport):
            connection.data_received(POST + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n" + sent)
            await settle()
            assert transport.statuses == [100]
            connection.data_received(b"body"[len(sent) :])
            await settle()
            connection.data_received(POST + b"\r\n")
            await settle()
            assert transport.statuses == [100, 200, 200]
            assert server.app.paths == ["/1", "/1"]

    asyncio.run(run())


@pytest.mark.parametrize("value", [b"y 100-continue", b"100-continue, x", b"x", b""])
def test_other_expectations_are_refused(value):
    statuses, written, paths = answered(POST + b"Expect: " + value + b"\r\nContent-Length: 1\r\n\r\nx")
    assert (statuses, paths) == ([417], [])
    assert b"`Expect` must be 100-continue" in written
