"""Replicas that may be given a request, with what need not be looked up again as long as they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from llm_serving.engine.engine import Engine
from llm_serving.kvcache import BlockManager


class Fleet:
    """
    Args:
        engines: By index, in ascending order.
    """

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self.engines = engines
        self.indices = tuple(engines)
        self.pools = [(index, engine.scheduler.blocks.pool.has) for index, engine in engines.items()]

    @cached_property
    def smallest_cache(self) -> BlockManager:
        """What it can hold any of them can."""
        return min((each.scheduler.blocks for each in self.engines.values()), key=lambda each: each.longest)

    @property
    def present(self) -> int | None:
        """One of them whose WorkAgent is there; None: all are away."""
        return next((index for index, engine in self.engines.items() if engine.away is None), None)
