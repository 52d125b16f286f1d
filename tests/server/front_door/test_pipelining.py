"""Requests sent ahead of their answers."""

from __future__ import annotations

import asyncio

from support.door_harness import GET, door, settle


def test_one_request_at_a_time_reaches_the_application():
    async def run():
        async with door() as (house, connection, _):
            house.app.gate.clear()
            connection.data_received(b"".join(GET % number for number in range(9)))
            await settle()
            assert house.app.paths == ["/0"]
            house.app.gate.set()
            await settle()
            await settle()
            assert house.app.paths == [f"/{number}" for number in range(9)]

    asyncio.run(run())


def test_what_is_far_ahead_stays_unread():
    async def run():
        async with door(max_pipelined_bytes=100) as (house, connection, transport):
            house.app.gate.clear()
            connection.data_received(GET % 0 + GET % 1)
            await settle()
            assert transport.reading  # so that a client that leaves is noticed
            connection.data_received(GET % 2 * 10)
            assert not transport.reading
            await settle()
            assert not transport.reading  # although the application watches for the client
            house.app.gate.set()
            while len(transport.statuses) < 12:
                await asyncio.sleep(0)
            assert transport.reading

    asyncio.run(run())


def test_whoever_leaves_with_requests_ahead_is_noticed():
    async def run():
        async with door() as (house, connection, _):
            house.app.gate.clear()
            connection.data_received(GET % 0 + GET % 1)
            await settle()
            connection.connection_lost(None)
            await settle()
            assert house.app.left == ["/0"]

    asyncio.run(run())
