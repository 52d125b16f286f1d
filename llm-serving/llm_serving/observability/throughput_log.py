"""A periodic log line with the load and the token rates of all engines."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from llm_serving.core.timings import Clock
from llm_serving.log import get_logger
from llm_serving.observability.metrics import Metrics, Totals

logger = get_logger(__name__)


class _Reading(NamedTuple):
    time: float
    totals: Totals


class ThroughputLine:
    """Makes a log line from the change of the metrics since the previous line."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._before = self._read()

    def next(self) -> str | None:
        """Return the line for the time since the previous call; None: no step ran."""
        before, self._before = self._before, self._read()
        now = self._before
        seconds = now.time - before.time
        done = Totals(*(new - old for new, old in zip(now.totals, before.totals, strict=True)))
        if done.steps == 0 or seconds <= 0:
            return None
        load = self._metrics.load_now()
        hits = f"{done.prefix_hits / done.prefix_queries:.0%}" if done.prefix_queries else "-"
        return (
            f"{load.num_running} running, {load.num_waiting} waiting; "
            f"prompt {done.prompt_tokens / seconds:.1f} tok/s, "
            f"generation {done.generation_tokens / seconds:.1f} tok/s; "
            f"KV cache {load.kv_usage:.1%}, prefix hits {hits}, {done.preemptions} preemptions"
        )

    def _read(self) -> _Reading:
        return _Reading(self._clock(), self._metrics.totals())


async def log_throughput(metrics: Metrics, clock: Clock, interval_s: float) -> None:
    """Log a line every `interval_s` seconds, unless no step ran, until the task is cancelled."""
    line = ThroughputLine(metrics, clock)
    while True:
        await asyncio.sleep(interval_s)
        if (text := line.next()) is not None:
            logger.info("%s", text)
