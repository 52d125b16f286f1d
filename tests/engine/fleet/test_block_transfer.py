"""Blocks on their way: whoever waits for them hears of their end, whatever it is, and is not kept waiting for ever."""

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
from llm_serving.engine.fleet.migration import SHARE, BlockTransferrer, TransferThrottle, carried
from llm_serving.errors import WorkerDiedError
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.transport.messages import BlockContents
from support.async_engine_setup import linked
from support.fake_runner import FakeTransferPool

NUM_REQUESTS = 20
"""That are brought from a replica, one after the other."""
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


def a_pool() -> FakeTransferPool:
    pool = FakeTransferPool(len(BLOCKS))
    pool.write(*map(list, zip(*BLOCKS, strict=True)), [4] * len(BLOCKS), bytes(16 * len(BLOCKS)))
    return pool


@pytest.mark.parametrize("error", [WorkerDiedError("gone"), MemoryError(), ValueError("a fault of ours")], ids=repr)
def test_what_cannot_be_brought_is_told(error: Exception) -> None:
    carrier, told = BlockTransferrer(), Future[bool]()
    link = FailingLink(error)
    carrier.carry(0, BLOCKS, link, link, told.set_result)
    assert told.result(timeout=60) is False
    carrier.close()


def test_whoever_answers_each_question_late_is_given_up_and_asked_again_next_time() -> None:
    source, target = a_pool(), FakeTransferPool(len(BLOCKS))
    now, really = 0.0, source.read

    def slow(*args: Any) -> Any:
        nonlocal now
        now += 25.0  # of the 60 s that an answer may take
        return really(*args)

    with linked(source, 16) as here, linked(target, 16) as there:
        source.read = slow  # type: ignore[method-assign]
        assert not carried(BLOCKS, here, there, 60.0, lambda: now)
        assert not (here.is_closed or there.is_closed)
        source.read = really  # type: ignore[method-assign]
        assert carried(BLOCKS, here, there, now + 60.0, lambda: now)
    assert target.blocks == source.blocks


def test_two_replicas_that_bring_each_other_blocks_do_not_wait_for_each_other() -> None:
    """Frames that no socket has room for: whoever sends one is read from at once."""
    tokens = 2**16
    pools = [FakeTransferPool(2 * 8) for _ in range(2)]
    parts = [[(each, 1) for each in range(first, first + 8)] for first in (0, 8)]
    for pool, part in zip(pools, parts, strict=True):
        ids, epochs = map(list, zip(*part, strict=True))
        pool.write(ids, epochs, [4] * 8, bytes(8 * 4 * tokens))
    carrier, told = BlockTransferrer(), [Future[bool]() for _ in range(2)]
    with linked(pools[0], 4 * tokens) as first, linked(pools[1], 4 * tokens) as second:
        carrier.carry(0, parts[0], first, second, told[0].set_result)
        carrier.carry(1, parts[1], second, first, told[1].set_result)
        assert all(each.result(timeout=60) for each in told)
    carrier.close()
    assert pools[0].tags.epochs.tolist() == pools[1].tags.epochs.tolist() == [1] * 16


class WaitingLink(FailingLink):
    """Fails what it is asked for, as soon as it may."""

    def __init__(self) -> None:
        super().__init__(WorkerDiedError("gone"))
        self.asked, self.may_go_on = Event(), Event()

    def read(self, pieces: Iterable[Sequence[TransferBlock]]) -> Generator[BlockContents, None, None]:
        self.asked.set()
        assert self.may_go_on.wait(60)
        return super().read(pieces)


@pytest.mark.parametrize(
    ("most_requests", "most_bytes"), [(2, 10**6), (10, 2 * 16 * len(BLOCKS))], ids=["requests", "bytes"]
)
def test_what_is_taken_from_one_replica_at_a_time_is_bounded(
    monkeypatch: pytest.MonkeyPatch, most_requests: int, most_bytes: int
) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", most_requests)
    monkeypatch.setattr(module, "MAX_BYTES", most_bytes)
    carrier, link, told = BlockTransferrer(), WaitingLink(), [Future[bool]() for _ in range(4)]
    taken = [carrier.carry(0, BLOCKS, link, link, each.set_result) for each in told[:3]]
    assert taken == [True, True, False]
    assert carrier.carry(1, BLOCKS, link, link, told[2].set_result), "others' blocks are not in the way"
    link.may_go_on.set()
    assert [each.result(timeout=60) for each in told[:3]] == [False] * 3
    assert carrier.carry(0, BLOCKS, link, link, told[3].set_result), "there is room again"
    carrier.close()


def test_a_request_that_is_larger_than_all_may_be_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1)
    carrier, link, told = BlockTransferrer(), WaitingLink(), Future[bool]()
    assert carrier.carry(0, BLOCKS, link, link, told.set_result)
    assert not carrier.carry(0, BLOCKS[:1], link, link, told.set_result)
    link.may_go_on.set()
    carrier.close()


def test_where_no_thread_can_be_had_nothing_is_brought_and_later_is_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    carrier, link, told = BlockTransferrer(), FailingLink(WorkerDiedError("gone")), Future[bool]()
    with monkeypatch.context() as without_threads:
        without_threads.setattr(Thread, "start", start)
        for _ in range(module.MAX_REQUESTS + 1):
            assert not carrier.carry(0, BLOCKS, link, link, told.set_result)
    assert carrier.carry(0, BLOCKS, link, link, told.set_result), "what was not brought is not counted"
    assert told.result(timeout=60) is False
    carrier.close()
    assert not carrier.carry(0, BLOCKS, link, link, told.set_result)


def test_the_time_that_blocks_may_take_begins_when_they_come() -> None:
    """What is before them takes longer than that: they are not even asked for."""
    now = 0.0
    carrier, before, told = BlockTransferrer(clock=lambda: now), WaitingLink(), Future[bool]()
    carrier.carry(0, BLOCKS, before, before, lambda there: None)
    with linked(a_pool(), 16) as here, linked(FakeTransferPool(len(BLOCKS)), 16) as there:
        carrier.carry(0, BLOCKS, here, there, told.set_result)
        assert before.asked.wait(60)
        now = 61.0
        before.may_go_on.set()
        assert told.result(timeout=60) is False
        assert not (here.is_closed or there.is_closed)
    carrier.close()


def test_whoever_waits_for_a_link_does_not_wait_for_ever() -> None:
    with linked(a_pool(), 16) as here, linked(FakeTransferPool(len(BLOCKS)), 16) as there, there.locked(0.0):
        assert not carried(BLOCKS, here, there, 0.0, lambda: 0.0)


def test_whoever_brings_blocks_rests_before_each_frame_and_after_the_last() -> None:
    rested: list[int] = []
    carrier, told = BlockTransferrer(lambda: rested.append(get_ident())), Future[bool]()
    with linked(a_pool(), 16) as here, linked(FakeTransferPool(len(BLOCKS)), 16) as there:
        carrier.carry(0, BLOCKS, here, there, told.set_result)
        assert told.result(timeout=60)
    carrier.close()
    assert len(rested) == len(BLOCKS) + 1
    assert len({*rested} - {get_ident()}) == 1, "in one thread, which is not that of who asks"


class VirtualTime:
    """Of so many threads that bring blocks beside each other, each on a core of its own: time goes on when all of them
    wait for it."""

    def __init__(self, num_threads: int) -> None:
        self.now = 0.0
        self.computed: Counter[int] = Counter()
        """Seconds, by thread."""
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
            self._go_on()
            assert self._changed.wait_for(lambda: get_ident() not in self._woken_at, timeout=60)

    def end(self) -> None:
        """The thread has nothing more to do."""
        with self._changed:
            self._num_threads -= 1
            self._go_on()

    def _go_on(self) -> None:
        if self._woken_at and len(self._woken_at) == self._num_threads:
            first = min(self._woken_at, key=lambda each: self._woken_at[each])
            self.now = self._woken_at.pop(first)
            self._changed.notify_all()


class WorkingLink(FailingLink):
    """Each of its frames takes the thread a second."""

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
def test_all_that_bring_blocks_reach_their_share_of_a_core_and_do_not_exceed_it(count: int, has_steps: bool) -> None:
    """While no step is under way each has a core."""
    time, num_brought = VirtualTime(count), Counter[int]()
    pace = TransferThrottle(lambda: has_steps, lambda: time.now, time.own, time.pause)

    def rest() -> None:
        pace.rest()
        if num_brought[get_ident()] == NUM_REQUESTS:
            time.end()

    def done(there: bool) -> None:
        assert there
        num_brought[get_ident()] += 1

    carrier, link = BlockTransferrer(rest, lambda: time.now), WorkingLink(time)
    for replica, _ in itertools.product(range(count), range(NUM_REQUESTS)):
        assert carrier.carry(replica, BLOCKS, link, link, done)
    carrier.close()
    num_frames = count * NUM_REQUESTS * len(BLOCKS) // link.blocks_per_frame
    assert sum(time.computed.values()) == num_frames
    cores = SHARE if has_steps else count
    assert cores * time.now - count <= num_frames <= cores * time.now + count
