"""The running requests, and a snapshot of them for one step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Final

from llm_serving.core.request import RUNNING, Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.scheduler.limits import SchedulerLimits

QUEUE_KEY: Final = attrgetter("queue_key")
ADMISSION_NUMBER: Final = attrgetter("admission_number")
LAST_SCHEDULED_STEP: Final = attrgetter("last_scheduled_step")


class RunningSlots:
    """The running requests, sorted by `queue_key`. Each holds one of `max_num_seqs` slots."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, classes: Sequence[RequestClass]) -> None:
        self.running: list[Request] = []
        self.slots_by_class = {each.name: 0 for each in classes}
        self.blocks_by_class = dict(self.slots_by_class)
        """Class -> number of blocks of its running requests. A block that two requests share counts twice."""
        self._limits = limits
        self._blocks = blocks
        self._ranks = {each.name: each.rank for each in classes}
        self._max_running = limits.max_num_seqs
        """Maximum number of running requests. It exceeds `max_num_seqs` after a reload that set a lower limit."""

    def __len__(self) -> int:
        return len(self.running)

    @property
    def _adapters(self) -> AdapterSlots:
        adapters = self._blocks.adapters
        assert adapters is not None, "the model serves no adapters"
        return adapters

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self._limits.max_num_seqs

    def add(self, request: Request) -> None:
        if request.adapter:
            self._adapters.acquire(request, request.last_scheduled_step + 1)
        self._count(request, 1)
        insort(self.running, request, key=QUEUE_KEY)

    def adopt(self, running: Sequence[Request]) -> None:
        """Take over requests that keep running after a reload. Their keys and classes may have changed."""
        for request in running:
            self._insert(request)
        self._max_running = max(self._max_running, len(running))

    def remove(self, request: Request) -> None:
        self.running.remove(request)
        if request.adapter:
            self._adapters.release(request)
        self._count(request, -1)
        self._max_running = max(self._limits.max_num_seqs, len(self.running))

    @contextmanager
    def reinserting(self, request: Request) -> Iterator[None]:
        """Return a context in which a running request's key or class may change. It is sorted again at the end."""
        runs = request.status is RUNNING
        if runs:
            self.running.remove(request)
            self._count(request, -1)
        yield
        if runs:
            self._insert(request)

    def _insert(self, request: Request) -> None:
        self._count(request, 1)
        insort(self.running, request, key=QUEUE_KEY)

    def clear(self) -> None:
        self.running.clear()
        if self._blocks.adapters is not None:
            self._blocks.adapters.release_all()
        self.slots_by_class = dict.fromkeys(self.slots_by_class, 0)
        self.blocks_by_class = dict.fromkeys(self.blocks_by_class, 0)

    def grow(self, request: Request) -> bool:
        """Allocate the blocks that a running request lacks. Return False if too few are free."""
        num_new = self._blocks.grow(request.request_id, self.num_tokens_to_allocate(request))
        if num_new is None:
            return False
        self.blocks_by_class[request.request_class.name] += num_new
        return True

    def free_outside_window(self, request: Request) -> None:
        num_freed = self._blocks.free_outside_window(request.request_id, request.num_computed_tokens)
        self.blocks_by_class[request.request_class.name] -= num_freed

    def num_blocks_to_admit(self, request: Request, parent: Request | None, without: Sequence[Request] = ()) -> int:
        num_tokens, is_protected = self.num_tokens_to_allocate(request), self.is_protected(request)
        return self._blocks.num_blocks_to_admit(request, num_tokens, parent, without, guaranteed=is_protected)

    def has_room_for(self, request: Request, parent: Request | None, without: Sequence[Request] = ()) -> bool:
        """Return whether slots and blocks suffice for a request, if the requests `without` are preempted first. One
        block per running request and group of layers must stay free, so that running requests can grow without
        preemption.
        """
        num_running = len(self.running) - len(without)
        if num_running >= self._limits.max_num_seqs:
            return False
        if request.adapter and not self._adapters.has_room_for(request, without):
            return False
        num_kept = num_running * self._blocks.num_groups
        return self.num_blocks_to_admit(request, parent, without) + num_kept <= self._blocks.pool.num_free_blocks

    def is_at_limit(self, request: Request, share: RequestClass) -> bool:
        if share.max_running_share == 1.0 and share.max_kv_share == 1.0:
            return False
        members = [other for other in self.running if other.request_class is share and not other.paused]
        if not members:
            return False
        num_held = sum(self._blocks.num_blocks_held(member.request_id) for member in members)
        num_blocks = num_held + self._blocks.max_blocks_of(self.num_tokens_to_allocate(request))
        return (
            len(members) + 1 > share.max_running_share * self._limits.max_num_seqs
            or num_blocks > share.max_kv_share * self._blocks.pool.num_blocks
        )

    def largest_other_class(self, request_class: RequestClass) -> str | None:
        others = {name: number for name, number in self.slots_by_class.items() if number and name != request_class.name}
        return max(others, key=others.__getitem__, default=None)

    def has_lower_class(self, request_class: RequestClass) -> bool:
        return any(number and self._ranks[name] > request_class.rank for name, number in self.slots_by_class.items())

    def num_tokens_to_allocate(self, request: Request) -> int:
        """Return how many tokens need blocks now: the maximum length if `is_protected`, else the present length."""
        return request.max_num_tokens if self.is_protected(request) else request.num_tokens

    def is_protected(self, request: Request) -> bool:
        """Whether the request was preempted `max_preemptions` times. Protected requests are not preempted again."""
        return request.num_preemptions >= self._limits.max_preemptions

    def check_integrity(self) -> None:
        assert len(self.running) <= self._max_running
        assert all(request.status is RUNNING for request in self.running)
        if self._blocks.adapters is not None:
            self._blocks.adapters.check_integrity(self.running)
        keys = [request.queue_key for request in self.running]
        assert keys == sorted(keys)
        slots, blocks = dict.fromkeys(self.slots_by_class, 0), dict.fromkeys(self.slots_by_class, 0)
        for request in self.running:
            slots[request.request_class.name] += 1
            blocks[request.request_class.name] += self._blocks.num_blocks_held(request.request_id)
        assert self.slots_by_class == slots
        assert self.blocks_by_class == blocks

    def _count(self, request: Request, sign: int) -> None:
        name = request.request_class.name
        self.slots_by_class[name] += sign
        self.blocks_by_class[name] += sign * self._blocks.num_blocks_held(request.request_id)


class RunningSnapshot:
    """The running requests by stage. The snapshot is outdated once a request is added, removed or computed."""

    __slots__ = ("decoding", "least_scheduled_step", "num_decoding", "prefilling")

    def __init__(self, requests: Iterable[Request]) -> None:
        self.decoding = decoding = list[Request]()
        """Requests that can get an output token in this step."""
        self.prefilling = prefilling = list[Request]()
        """Requests with more than one known token to compute, in order of admission."""
        num_left_out = 0
        for request in requests:
            in_flight = request.num_tokens_in_flight
            num_output = len(request.output_token_ids) + in_flight
            num_uncomputed = len(request.prompt_token_ids) + num_output - request.num_computed_tokens
            if num_uncomputed == 1 and num_output:
                if request.paused:
                    continue
                if num_output < request.sampling.max_tokens and not (
                    request.is_migrating or (in_flight and (request.needs_known_output or request.draft_token_ids))
                ):
                    decoding.append(request)
                else:
                    num_left_out += 1
            elif num_uncomputed > 0:
                prefilling.append(request)
        if len(prefilling) > 1:
            prefilling.sort(key=ADMISSION_NUMBER)
        self.num_decoding = len(decoding) + num_left_out
        """Number of requests whose prompt is complete, including those that cannot get a token in this step."""
        self.least_scheduled_step: int | None = min(map(LAST_SCHEDULED_STEP, decoding), default=None)


def preemption_order(running: Sequence[Request]) -> Iterator[Request]:
    """Yield running requests in the order of preemption: paused ones first, then by descending `queue_key`."""
    yield from [request for request in reversed(running) if request.paused]
    yield from [request for request in reversed(running) if not request.paused]
