"""The places that requests run in: who has one, and what each class holds by them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler.limits import SchedulerLimits


class RunningSlots:
    """The running requests in their order, and the places and blocks of each class."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, classes: Sequence[RequestClass]) -> None:
        self.running: list[Request] = []
        """Sorted by `queue_key`."""
        self.slots_by_class = {each.name: 0 for each in classes}
        """Places that requests of each class run in."""
        self.blocks_by_class = dict(self.slots_by_class)
        """Blocks in the tables of these requests; one that two share counts for both."""
        self._limits = limits
        self._blocks = blocks
        self._ranks = {each.name: each.rank for each in classes}
        self._max_running = limits.max_num_seqs
        """Places that there are; more than the limit where more ran when that was lowered, until they have ended."""

    def __len__(self) -> int:
        return len(self.running)

    @property
    def is_full(self) -> bool:
        """Whether there are as many as there may be."""
        return len(self.running) >= self._limits.max_num_seqs

    def add(self, request: Request) -> None:
        """The request, which has its blocks, runs from now on."""
        self._count(request, 1)
        insort(self.running, request, key=_queue_key)

    def adopt(self, running: Sequence[Request]) -> None:
        """Those that run under other limits keep their places; they have another order, or class, perhaps."""
        for request in running:
            self.add(request)
        self._max_running = max(self._max_running, len(running))

    def remove(self, request: Request) -> None:
        """The request, which still has its blocks, runs no longer."""
        self.running.remove(request)
        self._count(request, -1)
        self._max_running = max(self._limits.max_num_seqs, len(self.running))

    @contextmanager
    def reinserting(self, request: Request) -> Iterator[None]:
        """While its key or class changes, the request keeps the place that it has, if it has one."""
        runs = request.status is RUNNING
        if runs:
            self.running.remove(request)
            self._count(request, -1)
        yield
        if runs:
            self.add(request)

    def clear(self) -> None:
        """Nobody runs any more."""
        self.running.clear()
        self.slots_by_class, self.blocks_by_class = (
            dict.fromkeys(self.slots_by_class, 0),
            dict.fromkeys(self.slots_by_class, 0),
        )

    def grow(self, request: Request) -> None:
        """Makes the request's table hold what it must, as far as its window reaches; there are blocks for it."""
        before = self.num_blocks_of(request)
        self._blocks.grow(request.request_id, self.num_tokens_to_allocate(request))
        self.blocks_by_class[request.request_class.name] += self.num_blocks_of(request) - before

    def free_outside_window(self, request: Request) -> None:
        """Gives back the request's blocks that nothing it has still to compute sees."""
        before = self.num_blocks_of(request)
        self._blocks.free_outside_window(request.request_id, request.num_computed_tokens)
        self.blocks_by_class[request.request_class.name] += self.num_blocks_of(request) - before

    def can_grow(self, request: Request) -> bool:
        """Whether there are blocks for `grow`."""
        return self._blocks.can_grow(request.request_id, self.num_tokens_to_allocate(request))

    def allocate_blocks(self, request: Request, parent: Request | None) -> int:
        """Gives a request that `fits` its blocks; returns how many of its tokens are in them already."""
        keeps = self.is_protected(request)
        return self._blocks.admit(request, self.num_tokens_to_allocate(request), parent, keeps=keeps)

    def num_blocks_to_admit(self, request: Request, parent: Request | None, without: Sequence[Request] = ()) -> int:
        """Free blocks that `admit` would take, or would after those `without` gave way."""
        keeps = self.is_protected(request)
        return self._blocks.num_blocks_to_admit(
            request, self.num_tokens_to_allocate(request), parent, without, keeps=keeps
        )

    def has_room_for(self, request: Request, parent: Request | None, without: Sequence[Request] = ()) -> bool:
        """Whether slots and blocks are free for the request, or were if those `without` gave way.

        One block is kept for each running request, the watermark: so none is preempted before it has filled a block.
        """
        num_running = len(self.running) - len(without)
        if num_running >= self._limits.max_num_seqs:
            return False
        return self.num_blocks_to_admit(request, parent, without) + num_running <= self._blocks.pool.num_free_blocks

    def is_at_limit(self, request: Request, share: RequestClass) -> bool:
        """Whether the class has as many slots or blocks as it may, so that the request cannot run in it."""
        if share.max_running_share == 1.0 and share.max_kv_share == 1.0:
            return False
        members = [other for other in self.running if other.request_class is share and not other.paused]
        if not members:
            return False
        num_held = sum(map(self.num_blocks_of, members))
        num_blocks = num_held + self._blocks.max_blocks_of(self.num_tokens_to_allocate(request))
        return (
            len(members) + 1 > share.max_running_share * self._limits.max_num_seqs
            or num_blocks > share.max_kv_share * self._blocks.pool.num_blocks
        )

    def largest_other_class(self, request_class: RequestClass) -> str | None:
        """The class that holds most places, of those beside this one."""
        others = {name: number for name, number in self.slots_by_class.items() if number and name != request_class.name}
        return max(others, key=others.__getitem__, default=None)

    def has_lower_class(self, request_class: RequestClass) -> bool:
        """Whether a request of a lower class has a place."""
        return any(number and self._ranks[name] > request_class.rank for name, number in self.slots_by_class.items())

    def num_blocks_of(self, request: Request) -> int:
        return self._blocks.num_blocks_held(request.request_id)

    def num_tokens_to_allocate(self, request: Request) -> int:
        """Tokens that a request must have blocks for to be admitted."""
        return request.max_num_tokens if self.is_protected(request) else request.num_tokens

    def is_protected(self, request: Request) -> bool:
        """Whether it has lost its place as often as it may."""
        return request.num_preemptions >= self._limits.max_preemptions

    def check_integrity(self) -> None:
        """Raises AssertionError when what is counted is not what is there."""
        assert len(self.running) <= self._max_running
        assert all(request.status is RUNNING for request in self.running)
        keys = [request.queue_key for request in self.running]
        assert keys == sorted(keys)
        held, blocks_held = dict.fromkeys(self.slots_by_class, 0), dict.fromkeys(self.slots_by_class, 0)
        for request in self.running:
            held[request.request_class.name] += 1
            blocks_held[request.request_class.name] += self.num_blocks_of(request)
        assert self.slots_by_class == held
        assert self.blocks_by_class == blocks_held

    def _count(self, request: Request, sign: int) -> None:
        name = request.request_class.name
        self.slots_by_class[name] += sign
        self.blocks_by_class[name] += sign * self.num_blocks_of(request)


def preemption_order(running: Sequence[Request]) -> Iterator[Request]:
    """Running requests in the order in which they give way: paused ones before all others."""
    yield from [request for request in reversed(running) if request.paused]
    yield from [request for request in reversed(running) if not request.paused]


def _queue_key(request: Request) -> tuple[int, float, int, int]:
    return request.queue_key
