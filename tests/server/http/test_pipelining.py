"""Pipelined requests."""

from __future__ import annotations

import asyncio

from llm_serving.server.http import request as request_module
from support.connection_harness import GET, connected, settle


def test_one_request_at_a_time_reaches_the_application():
    async def run():
        async with connected() as (server, connection, _):
            server.app.gate.clear()
            connection.data_received(b"".join(GET % number for number in range(9)))
            await settle()
            assert server.app.paths == ["/0"]
            server.app.gate.set()
            await settle()
            await settle()
            assert server.app.paths == [f"/{number}" for number in range(9)]

    asyncio.run(run())


def test_pipelined_requests_beyond_the_limit_stay_unread():
    async def run():
        async with connected(max_pipelined_bytes=100) as (server, connection, transport):
            server.app.gate.clear()
            connection.data_received(GET % 0 + GET % 1)
            await settle()
            assert transport.reading  # so that a client that leaves is noticed
            connection.data_received(GET % 2 * 10)
            assert not transport.reading
            await settle()
            assert not transport.reading  # although the application watches for the client
            server.app.gate.set()
            while len(transport.statuses) < 12:
                await asyncio.sleep(0)
            assert transport.reading

    asyncio.run(run())


def test_disconnect_with_pipelined_requests_is_detected():
    async def run():
        async with connected() as (server, connection, _):
            server.app.gate.clear()
            connection.data_received(GET % 0 + GET % 1)
            await settle()
            connection.connection_lost(None)
            await settle()
            assert server.app.left == ["/0"]

    asyncio.run(run())


def test_arrival_time_is_that_of_the_complete_head_or_the_previous_response(monkeypatch):
    async def run():
        now = [10.0]
        monkeypatch.setattr(request_module, "monotonic", lambda: now[0])
        async with connected() as (server, connection, _):
            connection.data_received((GET % 1)[:10])
            now[0] = 20.0
            server.app.gate.clear()
            connection.data_received((GET % 1)[10:])
            await settle()
            connection.data_received(GET % 2)
            now[0] = 30.0
            server.app.gate.set()
            await settle()
            assert server.app.arrived == [20.0, 30.0]

    asyncio.run(run())
