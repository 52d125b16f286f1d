"""The answer of GET /v1/scheduler: who holds what and since when, as far as the caller may know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from llm_serving.observe.scheduler_state import ClassState, RunningState, SchedulerState, WaitingState

MAX_ROWS: Final = 256
"""Requests and tenants shown one by one; the others are counted."""


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


class Tenant(Struct, kw_only=True):
    tenant: str
    running: int
    waiting: int
    blocks: int
    served: dict[str, int]
    """By class: tokens it has got, each generated one counted twice; the least goes next."""


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


class Replica(Struct, kw_only=True):
    """One WorkAgent's scheduler at one moment."""

    replica: int
    step: int
    """Number of the next one."""
    policy: str
    slots: int
    running: int
    waiting: int
    blocks: Blocks
    classes: list[ClassQueue]
    tenants: list[Tenant]
    """With API keys, only the caller's own, unless it is an administrator; so are the lists below."""
    running_requests: list[RunningRequest]
    """In the order in which they decode."""
    waiting_requests: list[WaitingRequest]
    """In order of arrival."""


class SchedulerView(Struct):
    replicas: list[Replica]
    silent: list[int]
    """Replicas that were asked and did not answer in time: they wait for their WorkAgent."""


def view_of(states: dict[int, SchedulerState], silent: list[int], policy: str, tenant: str | None) -> SchedulerView:
    """What a tenant may see; everything with None."""
    return SchedulerView([_replica(index, states[index], policy, tenant) for index in sorted(states)], silent)


def _replica(index: int, state: SchedulerState, policy: str, tenant: str | None) -> Replica:
    running = [each for each in state.running if tenant in (None, each.tenant)]
    waiting = sorted(
        (each for each in state.waiting if tenant in (None, each.tenant)), key=lambda each: each.arrival_time
    )
    return Replica(
        replica=index,
        step=state.step,
        policy=policy,
        slots=state.num_slots,
        running=len(state.running),
        waiting=state.num_waiting,
        blocks=Blocks(
            tokens=state.block_size,
            total=state.num_blocks,
            used=state.num_used_blocks,
            cached=state.num_cached_blocks,
            free=state.num_blocks - state.num_used_blocks,
            host_total=state.num_host_blocks,
            host_used=state.num_used_host_blocks,
        ),
        classes=[_class(each, state) for each in state.classes],
        tenants=_tenants(running, waiting, state.classes),
        running_requests=_running(running[:MAX_ROWS], state.now),
        waiting_requests=[_waiting(each, state.now) for each in waiting[:MAX_ROWS]],
    )


def _class(each: ClassState, state: SchedulerState) -> ClassQueue:
    running = [request for request in state.running if request.request_class == each.name]
    arrivals = (request.arrival_time for request in state.waiting if request.request_class == each.name)
    oldest = min(arrivals, default=None)
    return ClassQueue(
        request_class=each.name,
        rank=each.rank,
        weight=each.weight,
        running=len(running),
        waiting=each.num_waiting,
        blocks=sum(request.num_blocks for request in running),
        oldest_s=None if oldest is None else state.now - oldest,
        bounds=each.bounds,
    )


def _tenants(
    running: Sequence[RunningState], waiting: Sequence[WaitingState], classes: Iterable[ClassState]
) -> list[Tenant]:
    """Those with most requests first."""
    num_running = Counter(each.tenant for each in running)
    num_waiting = Counter(each.tenant for each in waiting)
    blocks: Counter[str] = Counter()
    for each in running:
        blocks[each.tenant] += each.num_blocks
    return [
        Tenant(
            tenant=name,
            running=num_running[name],
            waiting=num_waiting[name],
            blocks=blocks[name],
            served={each.name: each.served[name] for each in classes if each.served.get(name)},
        )
        for name, _ in (num_running + num_waiting).most_common(MAX_ROWS)
    ]


def _running(requests: Sequence[RunningState], now: float) -> list[RunningRequest]:
    groups: dict[int, int] = {}
    """First block -> number, in the order of these requests: the number of a block would tell of others'."""
    return [
        RunningRequest(
            id=each.request_id,
            request_class=each.request_class,
            tenant=each.tenant,
            phase=each.phase,
            since_step=each.since_step,
            seconds=now - each.since,
            tokens=each.num_tokens,
            computed=each.num_computed_tokens,
            blocks=each.num_blocks,
            preemptions=each.num_preemptions,
            age=now - each.arrival_time,
            prompt=each.num_prompt_tokens,
            cached=each.num_cached_tokens,
            most=each.max_num_tokens,
            shared=each.num_shared_blocks,
            group=None if each.first_block is None else groups.setdefault(each.first_block, len(groups)),
        )
        for each in requests
    ]


def _waiting(each: WaitingState, now: float) -> WaitingRequest:
    return WaitingRequest(
        id=each.request_id,
        request_class=each.request_class,
        tenant=each.tenant,
        seconds=now - each.arrival_time,
        tokens=each.num_tokens,
        preemptions=each.num_preemptions,
        has_run=each.has_run,
        tenant_limit=each.is_apart,
        prompt=each.num_prompt_tokens,
        waited=each.num_steps_waited,
        bound=each.wait_bound,
    )
