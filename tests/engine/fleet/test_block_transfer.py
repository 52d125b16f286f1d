"""Transfers of KV blocks between machines: each ends, successfully or not, and its result is reported."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from threading import Condition, Event, Thread, get_ident
from typing import Any

import pytest
from llm_serving.engine.fleet import migration as module
from llm_serving.engine.fleet.migration import CPU_SHARE, BlockTransferrer, TransferThrottle, transfer_blocks
from llm_serving.errors import WorkerDiedError
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.transport.messages import BlockContents
from support.async_engine_setup import linked
from support.fake_runner import FakeTransferPool

NUM_REQUESTS = 20
"""Requests of each replica, transferred one after the other."""
BLOCKS = [(each, 1) for each in range(6)]


class FailingLink:
    blocks_per_frame, block_bytes, timeout_s = 2, 16, 60.0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def locked(self, timeout_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]:
        raise self._error

    def write(self, frames: Iterable[BlockContents]) -> None:
        raise AssertionError("nothing was read")


def create_pool() -> FakeTransferPool:
    pool = FakeTransferPool(len(BLOCKS))
    pool.write(*map(list, zip(*BLOCKS, strict=True)), [4] * len(BLOCKS), bytes(16 * len(BLOCKS)))
    return pool


@pytest.mark.parametrize("error", [WorkerDiedError("gone"), MemoryError(), ValueError("internal error")], ids=repr)
def test_a_failed_transfer_is_reported(error: Exception) -> None:
    transferrer, result = BlockTransferrer(), Future[bool]()
    link = FailingLink(error)
    transferrer.start(0, BLOCKS, link, link, result.set_result)
    assert result.result(timeout=60) is False
    transferrer.close()


def test_a_transfer_with_slow_frames_fails_at_the_deadline_and_its_links_stay_open() -> None:
    source, target = create_pool(), FakeTransferPool(len(BLOCKS))
    now, really = 0.0, source.read

    def slow(*args: Any) -> Any:
        nonlocal now
        now += 25.0  # seconds, of the 60 s that a reply may take
        return really(*args)

    with linked(source, 16) as here, linked(target, 16) as there:
        source.read = slow  # type: ignore[method-assign]
        assert not transfer_blocks(BLOCKS, here, there, 60.0, lambda: now)
        assert not (here.is_closed or there.is_closed)
        source.read = really  # type: ignore[method-assign]
        assert transfer_blocks(BLOCKS, here, there, now + 60.0, lambda: now)
    assert target.blocks == source.blocks


def test_transfers_in_opposite_directions_do_not_deadlock() -> None:
    """The frames are larger than the buffers of the sockets."""
    tokens = 2**16
    pools = [FakeTransferPool(2 * 8) for _ in range(2)]
    parts = [[(each, 1) for each in range(first, first + 8)] for first in (0, 8)]
    for pool, part in zip(pools, parts, strict=True):
        ids, epochs = map(list, zip(*part, strict=True))
        pool.write(ids, epochs, [4] * 8, bytes(8 * 4 * tokens))
    transferrer, results = BlockTransferrer(), [Future[bool]() for _ in range(2)]
    with linked(pools[0], 4 * tokens) as first, linked(pools[1], 4 * tokens) as second:
        transferrer.start(0, parts[0], first, second, results[0].set_result)
        transferrer.start(1, parts[1], second, first, results[1].set_result)
        assert all(each.result(timeout=60) for each in results)
    transferrer.close()
    assert pools[0].tags.epochs.tolist() == pools[1].tags.epochs.tolist() == [1] * 16


class WaitingLink(FailingLink):
    """Fails each read once `may_continue` is set."""

    def __init__(self) -> None:
        super().__init__(WorkerDiedError("gone"))
        self.asked, self.may_continue = Event(), Event()

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]:
        self.asked.set()
        assert self.may_continue.wait(60)
        return super().read(pieces)


@pytest.mark.parametrize(
    ("most_requests", "most_bytes"), [(2, 10**6), (10, 2 * 16 * len(BLOCKS))], ids=["requests", "bytes"]
)
def test_transfer_queue_of_a_replica_is_bounded(
    monkeypatch: pytest.MonkeyPatch, most_requests: int, most_bytes: int
) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", most_requests)
    monkeypatch.setattr(module, "MAX_BYTES", most_bytes)
    transferrer, link, results = BlockTransferrer(), WaitingLink(), [Future[bool]() for _ in range(4)]
    started = [transferrer.start(0, BLOCKS, link, link, each.set_result) for each in results[:3]]
    assert started == [True, True, False]
    assert transferrer.start(1, BLOCKS, link, link, results[2].set_result), "each replica has a queue of its own"
    link.may_continue.set()
    assert [each.result(timeout=60) for each in results[:3]] == [False] * 3
    assert transferrer.start(0, BLOCKS, link, link, results[3].set_result), "the queue has room again"
    transferrer.close()


def test_request_larger_than_the_transfer_queue_is_transferred_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1)
    transferrer, link, result = BlockTransferrer(), WaitingLink(), Future[bool]()
    assert transferrer.start(0, BLOCKS, link, link, result.set_result)
    assert not transferrer.start(0, BLOCKS[:1], link, link, result.set_result)
    link.may_continue.set()
    transferrer.close()


def test_transfers_fail_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    transferrer, link, result = BlockTransferrer(), FailingLink(WorkerDiedError("gone")), Future[bool]()
    with monkeypatch.context() as without_threads:
        without_threads.setattr(Thread, "start", start)
        for _ in range(module.MAX_REQUESTS + 1):
            assert not transferrer.start(0, BLOCKS, link, link, result.set_result)
    assert transferrer.start(0, BLOCKS, link, link, result.set_result), "transfers that did not start are not counted"
    assert result.result(timeout=60) is False
    transferrer.close()
    assert not transferrer.start(0, BLOCKS, link, link, result.set_result)


def test_the_timeout_of_a_transfer_begins_when_it_is_queued() -> None:
    """The transfer before it takes longer than the timeout, so no block of it is read."""
    now = 0.0
    transferrer, before, result = BlockTransferrer(clock=lambda: now), WaitingLink(), Future[bool]()
    transferrer.start(0, BLOCKS, before, before, lambda succeeded: None)
    with linked(create_pool(), 16) as here, linked(FakeTransferPool(len(BLOCKS)), 16) as there:
        transferrer.start(0, BLOCKS, here, there, result.set_result)
        assert before.asked.wait(60)
        now = 61.0
        before.may_continue.set()
        assert result.result(timeout=60) is False
        assert not (here.is_closed or there.is_closed)
    transferrer.close()


def test_a_transfer_does_not_wait_for_a_link_beyond_its_deadline() -> None:
    with linked(create_pool(), 16) as here, linked(FakeTransferPool(len(BLOCKS)), 16) as there, there.locked(0.0):
        assert not transfer_blocks(BLOCKS, here, there, 0.0, lambda: 0.0)


def test_a_transfer_is_throttled_before_each_frame_and_after_the_last() -> None:
    throttled_in: list[int] = []
    transferrer, result = BlockTransferrer(lambda: throttled_in.append(get_ident())), Future[bool]()
    with linked(create_pool(), 16) as here, linked(FakeTransferPool(len(BLOCKS)), 16) as there:
        transferrer.start(0, BLOCKS, here, there, result.set_result)
        assert result.result(timeout=60)
    transferrer.close()
    assert len(throttled_in) == len(BLOCKS) + 1
    assert len({*throttled_in} - {get_ident()}) == 1, "in one thread, which is not the caller's"


class VirtualTime:
    """Virtual time of transfer threads on a core each; it advances when all of them wait."""

    def __init__(self, num_threads: int) -> None:
        self.now = 0.0
        self.computed: Counter[int] = Counter()
        """CPU seconds of each thread."""
        self._num_threads = num_threads
        self._woken_at: dict[int, float] = {}
        self._changed = Condition()

    def work(self, seconds: float) -> None:
        self.computed[get_ident()] += seconds
        self.pause(seconds)

    def own(self) -> float:
        return self.computed[get_ident()]

    def pause(self, seconds: float) -> None:
        with self._changed:
            self._woken_at[get_ident()] = self.now + seconds
            self._advance()
            assert self._changed.wait_for(lambda: get_ident() not in self._woken_at, timeout=60)

    def end(self) -> None:
        """Remove the calling thread."""
        with self._changed:
            self._num_threads -= 1
            self._advance()

    def _advance(self) -> None:
        if self._woken_at and len(self._woken_at) == self._num_threads:
            first = min(self._woken_at, key=lambda each: self._woken_at[each])
            self.now = self._woken_at.pop(first)
            self._changed.notify_all()


class WorkingLink(FailingLink):
    """Each frame takes one second of CPU time."""

    timeout_s = math.inf

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]:
        for piece in pieces:
            self._time.work(1.0)
            yield BlockContents([each for each, _ in piece], [epoch for _, epoch in piece], [4] * len(piece), b"")

    def write(self, frames: Iterable[BlockContents]) -> None:
        for _ in frames:
            pass


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("has_steps", [True, False])
def test_transfer_threads_are_limited_to_their_share_of_a_core(count: int, has_steps: bool) -> None:
    """Without a step in flight each thread uses a core."""
    time, num_transferred = VirtualTime(count), Counter[int]()
    transfer_throttle = TransferThrottle(lambda: has_steps, lambda: time.now, time.own, time.pause)

    def throttle() -> None:
        transfer_throttle.wait()
        if num_transferred[get_ident()] == NUM_REQUESTS:
            time.end()

    def done(succeeded: bool) -> None:
        assert succeeded
        num_transferred[get_ident()] += 1

    transferrer, link = BlockTransferrer(throttle, lambda: time.now), WorkingLink(time)
    for replica, _ in itertools.product(range(count), range(NUM_REQUESTS)):
        assert transferrer.start(replica, BLOCKS, link, link, done)
    transferrer.close()
    num_frames = count * NUM_REQUESTS * len(BLOCKS) // link.blocks_per_frame
    assert sum(time.computed.values()) == num_frames
    cores = CPU_SHARE if has_steps else count
    assert cores * time.now - count <= num_frames <= cores * time.now + count
