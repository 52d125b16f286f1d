"""Requests of other HTTP versions than 1.1."""

from __future__ import annotations

import asyncio

import pytest
from support.connection_harness import connected, settle

OLD = b"GET / HTTP/1.0\r\n\r\n"


async def stream(scope, receive, send):
    """A response of unknown length."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    for piece in (b"one", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body"})


def answer(request, app=None):
    """Return the written bytes, and whether the connection ends."""

    async def run():
        async with connected() as (server, connection, transport):
            if app is not None:
                server.app = app
            connection.data_received(request)
            await settle()
            return transport.written, transport.closed

    return asyncio.run(run())


def test_http_1_0_response_of_unknown_length_ends_with_the_connection():
    """Chunked encoding came with HTTP/1.1: an older client reads chunk headers as text."""
    written, closed = answer(OLD, stream)
    head, body = written.split(b"\r\n\r\n", 1)
    assert body == b"onetwo"
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    assert closed


def test_http_1_0_response_of_known_length_has_its_length():
    written, closed = answer(OLD)
    assert b"\r\ncontent-length: 3\r\n" in written
    assert written.endswith(b"\r\n\r\n/=;")
    assert closed


def test_http_1_0_response_to_a_failure_of_the_application_has_its_body():
    async def fail(scope, receive, send):
        raise ValueError

    written, closed = answer(OLD, fail)
    assert written.startswith(b"HTTP/1.1 500 ")
    assert written.endswith(b"\r\n\r\nInternal Server Error")
    assert closed


def test_http_1_0_chunked_body_is_refused():
    """A proxy may see another end of it (RFC 9112, 6.1)."""
    written, _ = answer(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n")
    assert written.startswith(b"HTTP/1.1 400 ")
    assert written.endswith(b"}}")  # and nothing else


def test_http_1_0_gets_no_100_continue():
    written, _ = answer(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\na")
    assert written.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("version", [b"0.9", b"2.0", b"1.2", b"9.9"])
def test_other_http_versions_are_refused(version):
    written, _ = answer(b"GET / HTTP/" + version + b"\r\n\r\n")
    assert written[9:12] in (b"400", b"505")
