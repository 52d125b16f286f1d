"""The rows in which a scheduler is told of: what each has, and what of it is read where. There is no other table of it.

Made by the thread that owns the scheduler; nothing of them changes any more. Times are seconds until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.kvcache import BlockManager
from llm_serving.scheduler import Scheduler


class RunningRequest(Struct, kw_only=True):
    """A request that holds a slot."""

    id: str
    request_class: str
    tenant: str
    phase: str
    """`prefill`, `decode`, or `paused`: a beam that waits for the others of its search."""
    since_step: int
    seconds: float
    """It has held its slot."""
    tokens: int
    """Of prompt and output."""
    computed: int
    """Of these, in the cache or on their way there."""
    blocks: int
    preemptions: int
    age: float
    """Seconds since it arrived."""
    prompt: int
    """Tokens of its prompt."""
    cached: int
    """Of these, found computed when it first ran."""
    most: int
    """Tokens that it can have at most, of prompt and output."""
    shared: int
    """Blocks at its beginning that others hold as well."""
    group: int | None
    """Requests of the same number begin with the same block; null: it shares none."""

    @classmethod
    def of(cls, request: Request, blocks: BlockManager, now: float) -> RunningRequest:
        """Its group is the first block that it shares, which whoever shows it to others must name otherwise."""
        since_step, since = request.running_since
        num_shared = blocks.num_blocks_shared(request.request_id)
        return cls(
            id=request.request_id,
            request_class=request.request_class.name,
            tenant=request.tenant,
            phase="paused" if request.paused else "decode" if request.is_decoding else "prefill",
            since_step=since_step,
            seconds=now - since,
            tokens=request.num_tokens,
            computed=request.num_computed_tokens,
            blocks=blocks.num_blocks_held(request.request_id),
            preemptions=request.num_preemptions,
            age=now - request.arrival_time,
            prompt=request.num_prompt_tokens,
            cached=request.num_cached_tokens,
            most=request.max_num_tokens,
            shared=num_shared,
            group=next(iter(blocks.table(request.request_id))) if num_shared else None,
        )


class WaitingRequest(Struct, kw_only=True):
    id: str
    request_class: str
    tenant: str
    seconds: float
    """Since it arrived."""
    tokens: int
    preemptions: int
    has_run: bool
    """Whether it had a slot before and lost it."""
    tenant_limit: bool
    """Whether it waits for others of its tenant, which runs as many as it may."""
    prompt: int
    waited: int | None
    """Steps, of those that `bound` counts; null: nothing is promised, or it has been admitted before."""
    bound: int | None
    """Steps that it waits at most to be admitted for the first time."""

    @classmethod
    def of(cls, request: Request, scheduler: Scheduler, now: float, *, is_apart: bool) -> WaitingRequest:
        monitor = scheduler.waits.monitor
        is_promised = not request.has_run and monitor.watches(request)
        return cls(
            id=request.request_id,
            request_class=request.request_class.name,
            tenant=request.tenant,
            seconds=now - request.arrival_time,
            tokens=request.num_tokens,
            preemptions=request.num_preemptions,
            has_run=request.has_run,
            tenant_limit=is_apart,
            prompt=request.num_prompt_tokens,
            waited=monitor.num_waited(request) if is_promised else None,
            bound=request.wait_bound if is_promised else None,
        )


class ClassQueue(Struct, kw_only=True):
    """A class: its queue, and what it holds."""

    request_class: str
    rank: int
    weight: int
    running: int
    waiting: int
    blocks: int
    oldest_s: float | None
    """Seconds since the one arrived that came first of those that wait; null: nobody does."""
    bounds: str
    """What holds for each of its requests."""

    @classmethod
    def of(cls, each: RequestClass, scheduler: Scheduler, waiting: Sequence[WaitingRequest], bounds: str) -> ClassQueue:
        waits = [request.seconds for request in waiting if request.request_class == each.name]
        return cls(
            request_class=each.name,
            rank=each.rank,
            weight=each.weight,
            running=scheduler.held[each.name],
            waiting=len(scheduler.waiting.queues[each.name]),
            blocks=scheduler.places.blocks_held[each.name],
            oldest_s=max(waits, default=None),
            bounds=bounds,
        )


class Blocks(Struct, kw_only=True):
    """The key/value cache, and the host pool beside it."""

    tokens: int
    """Of one block."""
    total: int
    used: int
    cached: int
    """Free, and hold prefixes that can be found."""
    free: int
    """Those included."""
    host_total: int
    host_used: int

    @classmethod
    def of(cls, blocks: BlockManager) -> Blocks:
        pool, host = blocks.pool, blocks.host_pool
        return cls(
            tokens=blocks.block_size,
            total=pool.num_blocks,
            used=pool.num_used_blocks,
            cached=pool.num_cached_blocks,
            free=pool.num_free_blocks,
            host_total=host.num_blocks,
            host_used=host.num_used_blocks,
        )
