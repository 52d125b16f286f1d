"""A connection that sends much is read and parsed a little a turn."""

from __future__ import annotations

import asyncio
import socket

import pytest
from llm_serving.server.front_door import connection as connection_module
from llm_serving.server.front_door.connection import READ_BYTES, SLICE_BYTES
from llm_serving.server.front_door.turns import RIDES
from support.door_harness import GET, door, settle


def test_a_chunked_body_is_parsed_a_slice_a_turn():
    async def run():
        async with door() as (_, connection, transport):
            body = b"\n\r\n" * 20_000
            connection.data_received(
                b"POST /1 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body)
            )
            connection.data_received(body[:50_000])
            assert len(connection.cycle.body) <= SLICE_BYTES
            assert not transport.reading
            while not transport.reading:
                before = len(connection.cycle.body)
                await asyncio.sleep(0)
                assert len(connection.cycle.body) - before <= SLICE_BYTES
            connection.data_received(body[50_000:] + b"\r\n0\r\n\r\n")
            while not transport.statuses:
                await asyncio.sleep(0)
            assert transport.written.endswith(b"/1=" + body + b";")

    asyncio.run(run())


def test_after_a_full_read_it_is_the_others_turn():
    async def run():
        async with door() as (_, connection, transport):
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n")
            await settle()
            connection.data_received(b"x" * READ_BYTES)
            assert not transport.reading
            await settle()
            assert transport.reading

    asyncio.run(run())


def test_a_body_that_nobody_reads_is_not_read_on():
    async def run():
        async with door() as (house, connection, transport):
            house.app.reads = False
            house.app.gate.clear()
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n" + b"x" * 1000)
            connection.data_received(b"x" * READ_BYTES)
            for _ in range(3):
                assert not transport.reading
                await asyncio.sleep(0)
            assert len(connection.cycle.body) > READ_BYTES

    asyncio.run(run())


def test_the_rest_of_a_body_is_read_when_its_answer_comes_between_two_turns():
    async def run():
        async with door() as (house, connection, transport):
            house.app.reads = False
            house.app.gate.clear()
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n" + b"x" * 1000)
            connection.data_received(b"x" * READ_BYTES)
            connection.cycle.response_complete = True
            connection.on_response_complete()
            assert not transport.reading
            await settle()
            assert transport.reading

    asyncio.run(run())


def test_chunks_of_a_byte_are_refused_after_some_thousands():
    async def run():
        async with door() as (_, connection, transport):
            connection.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
            connection.data_received(b"1\r\na\r\n" * 6000)
            while transport.reading is False:
                await asyncio.sleep(0)
            assert transport.statuses == []
            connection.data_received(b"1\r\na\r\n" * 2000)
            while not transport.statuses:
                await asyncio.sleep(0)
            assert transport.statuses == [431]

    asyncio.run(run())


async def empty(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def turns_until_answered(house, connection, transport, request):
    """Turns of the loop, the time of each of which is used up by others."""

    def work():
        house.now += 1.0
        connection._turns.do_later("10.0.0.9", work)

    connection.app = empty
    work()
    await asyncio.sleep(0)
    connection.data_received(request)
    count = 0
    while not transport.statuses:
        await asyncio.sleep(0)
        count += 1
    return count


@pytest.mark.parametrize("path", [b"health", b"ping"])
def test_a_probe_waits_for_one_turn_and_others_for_more(path):
    async def run():
        async with door() as first, door() as second:
            probe = await turns_until_answered(*first, b"GET /" + path + b" HTTP/1.1\r\nHost: a\r\n\r\n")
            assert probe == 1
            assert await turns_until_answered(*second, GET % 1) > probe

    asyncio.run(run())


def test_of_many_who_speak_at_once_only_a_few_pass():
    """A thousand may have been silent until now."""

    async def run():
        async with door() as (house, connection, transport):
            others = [house.connect() for _ in range(40)]
            for each, _ in others:
                each._turns, each.app = connection._turns, empty
            await turns_until_answered(house, connection, transport, GET % 1)
            for each, _ in others:
                each.data_received(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0)
            assert 0 < sum(len(theirs.statuses) for _, theirs in others) <= RIDES
            for each, _ in others:
                each.connection_lost(None)

    asyncio.run(run())


def test_a_probe_behind_another_waits_like_others():
    async def run():
        async with door() as (house, connection, transport):
            await turns_until_answered(house, connection, transport, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
            before = len(transport.statuses)
            await asyncio.sleep(0)
            assert len(transport.statuses) == before == 1

    asyncio.run(run())


def test_a_request_has_arrived_when_its_head_had_whatever_it_waited_for_then(monkeypatch):
    async def run():
        now = [10.0]
        monkeypatch.setattr(connection_module, "monotonic", lambda: now[0])
        async with door() as (house, connection, transport):
            connection.unread_since = 7.0
            assert not connection.is_heard
            connection.data_received(GET % 1)  # had come while the connection waited to be welcomed
            await settle()
            connection.data_received((GET % 2)[:10])
            now[0] = 20.0
            connection._turns._spent_s = 1.0  # the turn is used up
            connection.data_received((GET % 2)[10:])
            assert not connection.is_heard
            now[0] = 30.0
            await settle()
            assert connection.is_heard
            house.app.gate.clear()
            connection.data_received(GET % 3)
            await settle()
            connection.data_received(GET % 4)
            now[0] = 40.0
            house.app.gate.set()
            await settle()
            assert house.app.paths == ["/1", "/2", "/3", "/4"]
            assert house.app.arrived == [7.0, 20.0, 30.0, 40.0]
            assert transport.statuses == [200] * 4

    asyncio.run(run())


def test_who_has_sent_what_the_loop_has_not_come_to_read_has_not_been_heard():
    async def run():
        async with door() as (house, connection, _):
            client, server = socket.socketpair()
            with client, server:
                connection.descriptor = server.fileno()
                assert connection.is_heard
                client.sendall(GET % 1)
                assert not connection.is_heard
                connection.data_received(server.recv(4096))
                await settle()
                assert connection.is_heard
                assert house.app.paths == ["/1"]
            assert connection.is_heard  # whatever the descriptor is by now

    asyncio.run(run())


def test_idle_is_who_was_answered_and_has_begun_nothing_since():
    async def run():
        async with door() as (house, connection, _):
            assert not connection.is_idle
            house.app.gate.clear()
            connection.data_received(GET % 1)
            await settle()
            assert not connection.is_idle
            house.app.gate.set()
            await settle()
            assert connection.is_idle
            connection.data_received((GET % 2)[:10])
            assert not connection.is_idle

    asyncio.run(run())
