"""Pictures of the engines for those who watch: taken while somebody does, once for all of them, and never for much.

A picture is taken at most every `LEAST_PAUSE_S`, and so seldom that taking, writing and sending pictures takes
`SHARE` of the time: what one takes is measured, and the pause before the next follows from it. A viewer that reads
slowly gets the newest picture when it comes for one; those between are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from llm_serving.core.clock import Clock
from llm_serving.errors import CapacityError
from llm_serving.log import get_logger
from llm_serving.observe.glance import Glance
from llm_serving.observe.metrics import Metrics
from llm_serving.server.live_view import picture_event

logger = get_logger(__name__)

LEAST_PAUSE_S: Final = 0.25
MOST_PAUSE_S: Final = 10.0
SHARE: Final = 0.01
"""Of one core."""
SEND_S: Final = 0.0002
"""Seconds of processor time that sending one picture to one viewer takes, connection and encryption included."""
TIMEOUT_S: Final = 1.0
"""How long an engine is waited for; the picture then says that it is silent."""
RETRY_AFTER_S: Final = 10.0


class Watched(Protocol):
    """Of an engine, what is watched."""

    async def glances(self, since: float, timeout_s: float) -> dict[int, Glance | None]: ...


class Viewer:
    """One who watches; sees what its tenant may, or everything with None."""

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant
        self.num_dropped = 0
        """Pictures that came while it had not taken the one before."""
        self._newest: bytes | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def show(self, picture: bytes) -> None:
        self.num_dropped += self._newest is not None
        self._newest = picture
        self._changed.set()

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """The newest picture, once there is one that it has not had; None: there are no more."""
        await self._changed.wait()
        self._changed.clear()
        if self._ended:
            self._changed.set()
            return None
        picture, self._newest = self._newest, None
        return picture


class LiveFeed:
    """Lives on the event loop.

    Args:
        watched: Told what the engines look like.
        metrics: Their totals.
        policy: Of their schedulers.
        max_viewers: At a time; a tenant has at most half of the places.
        clock: The engine's.
        cpu_clock: Processor time of the thread.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        watched: Watched,
        metrics: Metrics,
        policy: str,
        max_viewers: int,
        clock: Clock,
        *,
        cpu_clock: Clock = time.thread_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._watched = watched
        self._metrics = metrics
        self.policy = policy
        self._max_viewers = max_viewers
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._sleep = sleep
        self._viewers: list[Viewer] = []
        self._task: asyncio.Task[None] | None = None
        self._number = 0
        self._closed = False

    def join(self, tenant: str | None) -> Viewer:
        """Somebody watches from now on, until `leave`.

        Raises:
            CapacityError: As many do as may.
        """
        most = self._max_viewers
        if self._closed or len(self._viewers) >= most:
            raise CapacityError(f"{most} watch already (serving_config.max_live_viewers)", RETRY_AFTER_S)
        if tenant is not None and Counter(each.tenant for each in self._viewers)[tenant] >= max(1, most // 2):
            rule = "half of serving_config.max_live_viewers"
            raise CapacityError(f"{max(1, most // 2)} watch already with this key ({rule})", RETRY_AFTER_S)
        viewer = Viewer(tenant)
        self._viewers.append(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """With the last one nothing is looked at any more."""
        self._viewers.remove(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """Ends all streams: the server shall end, and they never would."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()

    async def _run(self) -> None:
        since = self._clock()
        while True:
            try:
                glances = await self._watched.glances(since, TIMEOUT_S)
                since = min((each.state.now for each in glances.values() if each is not None), default=since)
                spent_s = await self._show(glances)
            except Exception:
                logger.exception("a picture of the engines failed")
                spent_s = MOST_PAUSE_S
            await self._sleep(pause_s(spent_s))

    async def _show(self, glances: Mapping[int, Glance | None]) -> float:
        """Gives every viewer what it may see; returns the seconds of processor time it has taken."""
        self._number += 1
        now = self._clock()
        spent_s = sum(each.cpu_s for each in glances.values() if each is not None)
        for tenant in dict.fromkeys(each.tenant for each in self._viewers):
            began = self._cpu_clock()
            picture = picture_event(self._number, now, glances, self.policy, tenant, self._metrics)
            spent_s += self._cpu_clock() - began
            for viewer in self._viewers:
                if viewer.tenant == tenant:
                    viewer.show(picture)
                    spent_s += SEND_S
            await asyncio.sleep(0)  # one after the other, and others between them
        return spent_s


def pause_s(spent_s: float) -> float:
    """Seconds until the next picture after one that took so many of processor time."""
    return min(MOST_PAUSE_S, max(LEAST_PAUSE_S, spent_s / SHARE))
