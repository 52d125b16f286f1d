"""What a request waits for before the engine has it, which looks after its deadline from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from llm_serving.core.timings import Clock
from llm_serving.errors import TimedOutError

T = TypeVar("T")


async def before(deadline: float | None, clock: Clock, work: Awaitable[T]) -> T:
    """What work gives, as long as somebody has a use for it.

    Args:
        deadline: On the clock; None: there is none.
        clock: Seconds.
        work: It is cancelled when the deadline passes.

    Raises:
        TimedOutError: It has passed.
    """
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(max(0.0, deadline - clock())) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimedOutError("the deadline of the request has passed") from None
