"""Accepted requests, and repeated requests."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.errors import IdempotencyError, RequestNotFoundError
from llm_serving.server.idempotency.store import OVERHEAD_BYTES, AcceptedRequests, Claim
from llm_serving.server.tenant_quota import TenantQuota
from support.accepted_records import record


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def table(max_bytes=2**20, kept_s=60.0, clock=None, wall_clock=None) -> AcceptedRequests:
    clock = clock or Clock()
    return AcceptedRequests(TenantQuota(max_bytes), kept_s, wall_clock or clock, clock)


def test_stream_is_found_by_its_tenant_only():
    accepted = table()
    accepted.restore(record())
    assert accepted.find("f", "stream-0", "ann").request_id == "request-0"
    assert accepted.find("f", "stream-0", None).request_id == "request-0"
    for stream, tenant in (("stream-0", "bob"), ("stream-1", "ann")):
        with pytest.raises(RequestNotFoundError, match="still stored"):
            accepted.find("f", stream, tenant)
    accepted.restore(record(2, streams=False))
    with pytest.raises(RequestNotFoundError):
        accepted.find("f", "stream-2", "ann")


def test_recorded_requests_evict_the_oldest():
    accepted = table(max_bytes=3 * OVERHEAD_BYTES)
    for number in range(50):
        accepted.restore(record(number))
        assert accepted._sizes.num_bytes <= 3 * OVERHEAD_BYTES
    assert len(accepted) == 2
    assert isinstance(asyncio.run(accepted.claim("ann", "key-0", b"x")), Claim), "forgotten with its key"
    accepted.restore(record(60, request=b"x" * 10**6))
    assert len(accepted) == 2, "a record that does not fit displaces no other"


def test_recorded_requests_expire():
    clock = Clock()
    accepted = table(kept_s=60.0, clock=clock)
    accepted.restore(record())
    clock.now += 60.0
    accepted.find("f", "stream-0", None)
    clock.now += 0.1
    with pytest.raises(RequestNotFoundError):
        accepted.find("f", "stream-0", None)
    assert accepted._sizes.num_bytes == 0


@pytest.mark.parametrize("jump", [-(10.0**6), 10.0**6])
def test_clock_changes_do_not_affect_expiry(jump):
    clock, wall_clock = Clock(), Clock()
    accepted = table(kept_s=60.0, clock=clock, wall_clock=wall_clock)
    accepted.restore(record())
    wall_clock.now += jump
    accepted.find("f", "stream-0", None)
    clock.now += 60.1
    with pytest.raises(RequestNotFoundError):
        accepted.find("f", "stream-0", None)


def test_record_from_the_future_counts_as_new():
    clock, wall_clock = Clock(), Clock()
    wall_clock.now -= 10.0**6
    accepted = table(kept_s=60.0, clock=clock, wall_clock=wall_clock)
    accepted.restore(record())
    clock.now += 60.1
    with pytest.raises(RequestNotFoundError):
        accepted.find("f", "stream-0", None)


def test_idempotency_keys_are_separate():
    async def run():
        accepted = table()
        claim = await accepted.claim("ann", "key-0", b"d")
        await accepted.add(record())
        accepted.settle(claim)
        assert (await accepted.claim("ann", "key-0", b"d")).request_id == "request-0"
        with pytest.raises(IdempotencyError, match="Idempotency-Key"):
            await accepted.claim("ann", "key-0", b"other")
        assert isinstance(await accepted.claim("bob", "key-0", b"other"), Claim)

    asyncio.run(run())


def test_repeated_key_waits_for_the_first_request():
    async def run():
        accepted = table()
        claim = await accepted.claim("ann", "key-0", b"d")
        waiting = [asyncio.create_task(accepted.claim("ann", "key-0", b"d")) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(IdempotencyError):
            await accepted.claim("ann", "key-0", b"other")
        assert not any(task.done() for task in waiting)
        waiting.pop().cancel()
        await accepted.add(record())
        accepted.settle(claim)
        assert [(await task).request_id for task in waiting] == ["request-0"] * 2

    asyncio.run(run())


def test_key_of_a_refused_request_is_released():
    async def run():
        accepted = table()
        claim = await accepted.claim("ann", "key-0", b"d")
        waiting = [asyncio.create_task(accepted.claim("ann", "key-0", b"d")) for _ in range(2)]
        await asyncio.sleep(0)
        accepted.settle(claim)
        second = await waiting[0]
        assert isinstance(second, Claim)
        assert not waiting[1].done()
        accepted.settle(second)
        assert isinstance(await waiting[1], Claim)

    asyncio.run(run())


def test_released_key_belongs_to_the_next_request():
    async def run():
        accepted = table()
        first = await accepted.claim("ann", "key-0", b"d")
        accepted.settle(first)
        await accepted.claim("ann", "key-0", b"d")
        third = asyncio.create_task(accepted.claim("ann", "key-0", b"d"))
        accepted.settle(first)
        await asyncio.sleep(0)
        assert not third.done(), "the second has it"
        third.cancel()

    asyncio.run(run())


def test_repeated_key_waits_for_the_record():
    class Slow:
        def __init__(self) -> None:
            self.begun, self.written = asyncio.Event(), asyncio.Event()

        async def append(self, record):
            self.begun.set()
            await self.written.wait()

    async def run():
        accepted = table()
        log = accepted.log = Slow()
        claim = await accepted.claim("ann", "key-0", b"d")
        adding = asyncio.create_task(accepted.add(record()))
        await log.begun.wait()
        second = asyncio.create_task(accepted.claim("ann", "key-0", b"d"))
        await asyncio.sleep(0)
        assert not second.done()
        log.written.set()
        await adding
        accepted.settle(claim)
        assert (await second).request_id == "request-0"

    asyncio.run(run())
