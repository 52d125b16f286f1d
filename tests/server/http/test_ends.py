"""Ends of connections: late bodies, refusals, slow and stalled readers."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.server.http import connection as connection_module
from llm_serving.server.http.connection import PROGRESS_BYTES
from support.connection_harness import GET, Transport, connected, settle


@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"])
def test_reader_of_a_complete_response_is_not_evicted(head):
    async def run():
        async with connected() as (_server, connection, transport):
            assert not connection.is_busy
            transport.unsent = 100_000
            connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n")
            await settle()
            connection.pause_writing()
            assert transport.statuses == [200]
            assert connection.is_busy
            connection.resume_writing()
            transport.unsent = 0
            if not head:
                assert not connection.is_busy

    asyncio.run(run())


def test_connection_with_a_late_body_times_out():
    async def run():
        async with connected(idle_timeout_s=0.01) as (server, connection, transport):
            server.app.reads = False
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n")
            await settle()
            assert b"connection: close" not in transport.written
            assert transport.statuses == [200]
            assert not transport.is_closing()
            connection.data_received(b"body")
            while not transport.closed:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("kind", [b"Content-Length: 2001", b"Transfer-Encoding: chunked"])
def test_response_before_an_unread_body_closes_the_connection(kind):
    """Otherwise a client would send its next request into a connection that is being closed."""

    async def run():
        async with connected(max_request_body_bytes=2000) as (server, connection, transport):
            server.app.reads = False
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\n" + kind + b"\r\n\r\n")
            await settle()
            assert transport.statuses == [200]
            assert b"connection: close\r\n" in transport.written
            assert transport.eof and not transport.is_closing()
            connection.data_received(b"x" * 4_000_000)
            assert not transport.aborted
            connection.data_received(b"x" * 1_000_000)
            assert transport.aborted

    asyncio.run(run())


def test_refused_client_that_sends_can_read_the_response(monkeypatch):
    monkeypatch.setattr(connection_module, "LINGER_S", 0.01)

    async def run():
        async with connected() as (_, connection, transport):
            connection.data_received(b"GET /" + b"x" * 100_000)
            connection.data_received(b"x" * 100_000)
            await asyncio.sleep(0)
            assert not transport.aborted
            while not transport.aborted:
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_refused_client_can_read_the_response():
    async def run():
        async with connected() as (_server, connection, transport):
            connection.data_received(b"GET /" + b"x" * 100_000)
            assert transport.statuses == [414]
            assert transport.eof
            assert not transport.is_closing()
            connection.data_received(b"x" * 4_000_000)
            assert not transport.aborted
            connection.data_received(b"x" * 1_000_000)
            assert transport.aborted

    asyncio.run(run())


def test_stalled_reader_is_disconnected():
    async def run():
        async with connected(write_timeout_s=0.01) as (_server, connection, transport):
            connection.data_received(GET % 0)
            await settle()
            transport.unsent = 100_000
            connection.pause_writing()
            while not transport.aborted:
                await asyncio.sleep(0.001)

    asyncio.run(run())


@pytest.mark.parametrize("ended", [False, True])
def test_slow_reader_is_not_disconnected(ended):
    class Slow(Transport):
        looks = 0

        def get_write_buffer_size(self):
            self.looks += 1
            self.unsent = max(0, self.unsent - PROGRESS_BYTES)
            return self.unsent

    async def run():
        async with connected(write_timeout_s=0.001) as (server, _, _):
            connection = server.connection()
            transport = Slow()
            connection.connection_made(transport)
            transport.unsent = 10 * PROGRESS_BYTES
            if ended:
                connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                await settle()
                assert transport.closed
            else:
                connection.pause_writing()
            while transport.unsent > PROGRESS_BYTES:
                assert not transport.aborted
                await asyncio.sleep(0.001)
            assert transport.looks >= 8
            connection.connection_lost(None)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_tls_connection_closes_after_the_response_is_read():
    """Otherwise TLS drops unread data two seconds after the close has started."""

    async def run():
        async with connected() as (server, _, _):
            connection, transport = server.connection(), Transport(sslcontext=object())
            transport.unsent = 100_000

            def write(data):
                Transport.write(transport, data)
                if data.endswith(b";"):  # the whole answer
                    connection.pause_writing()

            transport.write = write
            connection.connection_made(transport)
            connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await settle()
            assert transport.statuses == [200]
            assert connection.is_closing()
            assert not transport.closed
            connection.resume_writing()
            assert transport.closed
            connection.connection_lost(None)

    asyncio.run(run())


def test_stalled_reader_is_disconnected_after_the_response():
    async def run():
        async with connected(write_timeout_s=0.01) as (_server, connection, transport):
            transport.unsent = 10
            connection.data_received(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            await settle()
            assert transport.closed
            while not transport.aborted:
                await asyncio.sleep(0.001)

    asyncio.run(run())
