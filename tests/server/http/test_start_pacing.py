"""Hundreds of simultaneous requests start a few in each iteration of the event loop."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from llm_serving.server.http.connection import STARTED_AT_ONCE
from support.connection_harness import GET, connected, settle


def test_requests_start_a_few_at_a_time():
    async def run():
        async with connected() as (server, _, _):
            others = [server.connect()[0] for _ in range(5 * STARTED_AT_ONCE)]
            for number, each in enumerate(others):
                each.data_received(GET % number)
            started = [0]
            while started[-1] < len(others):
                await asyncio.sleep(0)
                started.append(len(server.app.paths))
            assert max(after - before for before, after in itertools.pairwise(started)) <= STARTED_AT_ONCE
            for each in others:
                each.connection_lost(None)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_health_probe_starts_before_waiting_requests(path):
    async def run():
        async with connected() as (server, connection, _):
            others = [server.connect()[0] for _ in range(5 * STARTED_AT_ONCE)]
            for number, each in enumerate(others):
                each.data_received(GET % number)
            connection.data_received(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            while path not in server.app.paths:
                await asyncio.sleep(0)
            assert len(server.app.paths) <= STARTED_AT_ONCE + 1
            for each in others:
                each.connection_lost(None)

    asyncio.run(run())


def test_disconnected_waiting_request_is_skipped():
    async def run():
        async with connected() as (server, _, _):
            others = [server.connect()[0] for _ in range(3 * STARTED_AT_ONCE)]
            for number, each in enumerate(others):
                each.data_received(GET % number)
            await asyncio.sleep(0)
            for each in others[STARTED_AT_ONCE : 2 * STARTED_AT_ONCE]:
                each.connection_lost(None)
            await settle()
            assert len(server.app.paths) == 2 * STARTED_AT_ONCE
            for each in others:
                each.connection_lost(None)

    asyncio.run(run())
