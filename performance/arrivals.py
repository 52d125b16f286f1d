"""When requests are due: seeded schedules, and the loops that keep to them.

Open loop: requests come by the clock, whether or not the server keeps up, as independent users do. Closed loop: a fixed
number of clients, each sending its next request when the last one is answered.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence

Send = Callable[[int, float], Coroutine[None, None, None]]
"""Sends request number `index`, due at the `time.perf_counter` second given; returns when it is answered."""


def poisson(rate: float, num_requests: int, seed: int) -> list[float]:
    """Due times in seconds from the start, with independent exponential gaps of mean 1 / `rate`."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def fixed(rate: float, num_requests: int) -> list[float]:
    """Due times in seconds from the start, 1 / `rate` apart; the first at once."""
    return [index / rate for index in range(num_requests)]


def burst(rate: float, num_requests: int, burst_size: int) -> list[float]:
    """Due times in seconds from the start: `burst_size` requests at once, as often as keeps the mean `rate`."""
    return [index // burst_size * burst_size / rate for index in range(num_requests)]


async def open_loop(due_times_s: Sequence[float], send: Send) -> None:
    """Starts request `i` at `due_times_s[i]` (ascending, seconds from now) and returns when all are answered."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, offset in enumerate(due_times_s):
            due = start + offset
            delay = due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(send(index, due))


async def closed_loop(num_requests: int, concurrency: int, send: Send) -> None:
    """Keeps `concurrency` requests outstanding until `num_requests` are answered; each is due when its client is."""
    indices = iter(range(num_requests))

    async def client() -> None:
        for index in indices:  # shared: every client draws the next number
            await send(index, time.perf_counter())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, num_requests)):
            tasks.create_task(client())
