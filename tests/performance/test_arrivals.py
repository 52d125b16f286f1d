import asyncio
import statistics
from itertools import pairwise

import arrivals


def test_poisson_is_a_function_of_its_seed():
    assert arrivals.poisson(10, 50, seed=3) == arrivals.poisson(10, 50, seed=3)
    assert arrivals.poisson(10, 50, seed=3) != arrivals.poisson(10, 50, seed=4)


def test_a_longer_poisson_schedule_begins_with_the_shorter_one():
    assert arrivals.poisson(2, 100, seed=1)[:10] == arrivals.poisson(2, 10, seed=1)


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential():
    gaps = [b - a for a, b in pairwise([0.0, *arrivals.poisson(10, 20_000, seed=1)])]
    assert all(gap >= 0 for gap in gaps)
    # The standard error of the mean of 20,000 exponential gaps is 0.7 %; of their deviation 1 %.
    assert abs(statistics.fmean(gaps) / 0.1 - 1) < 0.03
    assert abs(statistics.stdev(gaps) / 0.1 - 1) < 0.04


def test_fixed_gaps():
    assert arrivals.fixed(4, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bursts_keep_the_mean_rate():
    assert arrivals.burst(2, 7, burst_size=3) == [0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 3.0]


def test_open_loop_sends_each_request_without_waiting_for_answers():
    sent: list[int] = []

    async def run() -> None:
        all_sent = asyncio.Event()

        async def send(index: int, due: float) -> None:
            sent.append(index)
            if len(sent) == 4:
                all_sent.set()
            await all_sent.wait()  # nobody is answered before everybody has sent

        await arrivals.open_loop([0.0, 0.0, 0.001, 0.002], send)

    asyncio.run(run())
    assert sent == [0, 1, 2, 3]


def test_open_loop_tells_when_each_request_was_due():
    dues: list[float] = []

    async def send(index: int, due: float) -> None:
        dues.append(due)

    asyncio.run(arrivals.open_loop([0.0, 0.0, 0.003], send))
    assert dues[1] == dues[0]
    assert round(dues[2] - dues[0], 9) == 0.003


def test_closed_loop_keeps_exactly_the_given_concurrency():
    outstanding = 0
    seen: list[int] = []
    indices: list[int] = []

    async def send(index: int, due: float) -> None:
        nonlocal outstanding
        outstanding += 1
        await asyncio.sleep(0)
        seen.append(outstanding)
        outstanding -= 1
        indices.append(index)

    asyncio.run(arrivals.closed_loop(10, 3, send))
    assert sorted(indices) == list(range(10))
    assert max(seen) == 3


def test_closed_loop_with_more_clients_than_requests():
    indices: list[int] = []

    async def send(index: int, due: float) -> None:
        indices.append(index)

    asyncio.run(arrivals.closed_loop(2, 100, send))
    assert indices == [0, 1]
