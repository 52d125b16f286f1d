"""Transfer threads together use no more than their share of a core while steps are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from llm_serving.engine.fleet.migration import CPU_SHARE, TransferThrottle

NUM_PIECES = 60


class Threads:
    """Real threads, of which one runs at a time, in virtual time: each processes pieces and waits after each piece."""

    def __init__(self, stack: ExitStack, count: int, has_steps: bool) -> None:
        self._pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(count)]
        self.free_at = [0.0] * count
        """Virtual time at which each thread begins its next piece."""
        self.computed = [0.0] * count
        self.now = 0.0
        self._thread = 0
        self.throttle = TransferThrottle(
            lambda: has_steps, lambda: self.now, lambda: self.computed[self._thread], self._pause
        )

    def work(self, seconds: float) -> None:
        """Let the first free thread process a piece of so many seconds, and wait."""
        self._thread = min(range(len(self._pools)), key=lambda each: self.free_at[each])
        self.now = self.free_at[self._thread] + seconds
        self.computed[self._thread] += seconds
        self.free_at[self._thread] = self.now
        self._pools[self._thread].submit(self.throttle.wait).result()

    def _pause(self, seconds: float) -> None:
        self.free_at[self._thread] += seconds


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("count", [1, 2, 5])
def test_throttle_limits_all_threads_together_to_their_share(stack: ExitStack, count: int) -> None:
    threads = Threads(stack, count, has_steps=True)
    for _ in range(NUM_PIECES):
        threads.work(1.0)
        assert sum(threads.computed) <= CPU_SHARE * threads.now + count
    assert sum(threads.computed) >= CPU_SHARE * threads.now


def test_throttle_does_not_accumulate_unused_time(stack: ExitStack) -> None:
    threads = Threads(stack, 1, has_steps=True)
    threads.work(1.0)
    threads.free_at[0] = 1000.0
    threads.work(1.0)
    assert threads.free_at[0] == 1001.0 + 1 / CPU_SHARE - 1


def test_throttle_delays_no_thread_without_a_step_in_flight(stack: ExitStack) -> None:
    threads = Threads(stack, 2, has_steps=False)
    for _ in range(NUM_PIECES):
        threads.work(1.0)
    assert threads.now == NUM_PIECES / 2
