"""The live feed: snapshots are taken once for all viewers, only while there are viewers, and less often if they cost
more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from llm_serving.errors import CapacityError
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.snapshot import EngineSnapshot, take_snapshot
from llm_serving.server.admin.live import LEAST_PAUSE_S, MOST_PAUSE_S, SEND_S, SHARE, LiveFeed, pause_s
from support.factories import create_request, create_scheduler, run_step


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Engines:
    """An engine whose snapshots take `cpu_s`."""

    def __init__(self) -> None:
        self.scheduler = create_scheduler()
        self.cpu_s = 0.0
        self.asked: list[float] = []

    async def snapshots(self, since: float, timeout_s: float) -> dict[int, EngineSnapshot | None]:
        self.asked.append(since)
        times: Iterator[float] = iter((0.0, self.cpu_s))
        return {0: take_snapshot(self.scheduler, EventLog(), 7.0, None, since, lambda: next(times))}


class Pauses:
    """Pauses that last until a test ends them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._passed = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self._passed.clear()
        await self._passed.wait()

    async def next(self) -> float:
        """End one pause and return the length of the next."""
        count = len(self.seconds)
        self._passed.set()
        return await self.reach(count + 1)

    async def reach(self, count: int) -> float:
        while len(self.seconds) < count:
            await asyncio.sleep(0)
        return self.seconds[-1]


def create_feed(engines: Engines, pauses: Pauses, max_viewers: int = 4) -> LiveFeed:
    clock = Clock()
    return LiveFeed(engines, Metrics("demo"), "mixed", max_viewers, clock, cpu_clock=clock, sleep=pauses)


def content(picture: bytes | None) -> dict[str, object]:
    assert picture is not None
    head, data = picture.decode().removesuffix("\n\n").split("\n")
    assert head == "event: picture"
    return dict(json.loads(data.removeprefix("data: ")))


def test_pause_is_proportional_to_the_cost_of_a_snapshot():
    assert pause_s(0.0) == LEAST_PAUSE_S
    assert pause_s(LEAST_PAUSE_S * SHARE) == LEAST_PAUSE_S
    assert pause_s(0.01) == pytest.approx(1.0)
    assert pause_s(1.0) == MOST_PAUSE_S


def test_snapshots_of_a_large_engine_are_less_frequent():
    async def run():
        engines, pauses = Engines(), Pauses()
        feed = create_feed(engines, pauses)
        feed.join(None)
        assert await pauses.reach(1) == LEAST_PAUSE_S
        engines.cpu_s = 0.02
        assert await pauses.next() == pytest.approx((0.02 + SEND_S) / SHARE)
        feed.join(None)
        assert await pauses.next() == pytest.approx((0.02 + 2 * SEND_S) / SHARE), "each viewer counts"

    asyncio.run(run())


def test_snapshot_is_taken_once_for_all_viewers():
    async def run():
        engines, pauses = Engines(), Pauses()
        feed = create_feed(engines, pauses)
        first, second = feed.join(None), feed.join(None)
        await pauses.reach(1)
        one, other = await first.next(), await second.next()
        assert one is other
        assert len(engines.asked) == 1

    asyncio.run(run())


def test_no_snapshot_is_taken_without_viewers():
    async def run():
        engines, pauses = Engines(), Pauses()
        feed = create_feed(engines, pauses)
        await asyncio.sleep(0)
        assert engines.asked == []
        viewer = feed.join(None)
        await pauses.reach(1)
        feed.leave(viewer)
        await asyncio.sleep(0)
        assert (len(engines.asked), len(asyncio.all_tasks())) == (1, 1)
        feed.join(None)
        await pauses.reach(2)
        assert len(engines.asked) == 2

    asyncio.run(run())


def test_snapshots_cover_consecutive_times():
    async def run():
        engines, pauses = Engines(), Pauses()
        create_feed(engines, pauses).join(None)
        await pauses.reach(1)
        await pauses.next()
        assert engines.asked == [0.0, 7.0]

    asyncio.run(run())


def test_slow_viewer_gets_the_newest_snapshot():
    async def run():
        engines, pauses = Engines(), Pauses()
        viewer = create_feed(engines, pauses).join(None)
        await pauses.reach(1)
        await pauses.next()
        await pauses.next()
        assert content(await viewer.next())["number"] == 3
        assert viewer.num_dropped == 2

    asyncio.run(run())


def test_number_of_viewers_is_limited():
    async def run():
        feed = create_feed(Engines(), Pauses(), max_viewers=4)
        mine = [feed.join("ann"), feed.join("ann")]
        with pytest.raises(CapacityError, match="2 clients with this key are already watching /v1/live"):
            feed.join("ann")
        feed.join("bob")
        feed.join(None)
        with pytest.raises(
            CapacityError, match=r"4 clients are already watching /v1/live \(serving_config.max_live_viewers\)"
        ):
            feed.join(None)
        feed.leave(mine[0])
        feed.join(None)

    asyncio.run(run())


def test_closing_the_feed_ends_all_streams():
    async def run():
        feed = create_feed(Engines(), Pauses())
        viewer = feed.join(None)
        feed.close()
        assert await viewer.next() is None
        with pytest.raises(CapacityError):
            feed.join(None)

    asyncio.run(run())


def test_failed_snapshot_does_not_stop_the_feed():
    class Failing(Engines):
        async def snapshots(self, since: float, timeout_s: float) -> dict[int, EngineSnapshot | None]:
            found = await super().snapshots(since, timeout_s)
            if len(self.asked) == 1:
                raise ValueError("of the engine")
            return found

    async def run():
        pauses = Pauses()
        viewer = create_feed(Failing(), pauses).join(None)
        assert await pauses.reach(1) == MOST_PAUSE_S
        await pauses.next()
        assert content(await viewer.next())["number"] == 1

    asyncio.run(run())


def test_snapshot_shows_the_bound_of_waiting_requests():
    scheduler = create_scheduler(max_num_seqs=1)
    for _ in range(2):
        scheduler.add(create_request())
    run_step(scheduler)
    [waiting] = take_snapshot(scheduler, EventLog(), 1.0, None, 0.0).state.waiting.values()
    assert waiting.bound is not None
    assert waiting.waited == 1
