"""GET /v1/scheduler: slots, queues, tenants and KV blocks of each replica, limited to what the caller may see."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.observability.snapshot import (
    BlockUsage,
    ClassQueueState,
    RunningRequest,
    SchedulerState,
    WaitingRequest,
)
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.middleware.authentication import tenant_seen
from llm_serving.server.parsing.offload import json_response

MAX_ROWS: Final = 256
"""Maximum number of requests, and of tenants, that are listed. Totals count all."""

ENDPOINTS: Final = Endpoints()


class Tenant(Struct, kw_only=True):
    tenant: str
    running: int
    waiting: int
    blocks: int
    served: dict[str, int]
    """Request class -> tokens computed. Output tokens count twice. The tenant with the fewest is scheduled next."""


class Replica(Struct, kw_only=True):
    """The state of one replica's scheduler between two steps."""

    replica: int
    step: int
    policy: str
    slots: int
    running: int
    waiting: int
    blocks: BlockUsage
    classes: list[ClassQueueState]
    tenants: list[Tenant]
    """If there are API keys, only administrators see other clients' entries, here and in the lists below."""
    running_requests: list[RunningRequest]
    waiting_requests: list[WaitingRequest]


class SchedulerView(Struct):
    replicas: list[Replica]
    silent: list[int]
    """Replicas that did not reply in time, because they wait for their WorkAgent."""


def view_of(states: dict[int, SchedulerState], silent: list[int], policy: str, tenant: str | None) -> SchedulerView:
    return SchedulerView([_replica(index, states[index], policy, tenant) for index in sorted(states)], silent)


def _replica(index: int, state: SchedulerState, policy: str, tenant: str | None) -> Replica:
    running = [each for each in state.running.values() if tenant in (None, each.tenant)]
    waiting = [each for _, each in sorted(state.waiting.items()) if tenant in (None, each.tenant)]
    return Replica(
        replica=index,
        step=state.step,
        policy=policy,
        slots=state.num_slots,
        running=len(state.running),
        waiting=state.num_waiting,
        blocks=state.blocks,
        classes=state.classes,
        tenants=_tenants(running, waiting, state.served),
        running_requests=_with_groups(running[:MAX_ROWS]),
        waiting_requests=waiting[:MAX_ROWS],
    )


def _tenants(
    running: Sequence[RunningRequest], waiting: Sequence[WaitingRequest], served: Mapping[str, Mapping[str, int]]
) -> list[Tenant]:
    num_running = Counter(each.tenant for each in running)
    num_waiting = Counter(each.tenant for each in waiting)
    blocks: Counter[str] = Counter()
    for each in running:
        blocks[each.tenant] += each.blocks
    return [
        Tenant(
            tenant=name,
            running=num_running[name],
            waiting=num_waiting[name],
            blocks=blocks[name],
            served={of_class: tokens[name] for of_class, tokens in served.items() if tokens.get(name)},
        )
        for name, _ in (num_running + num_waiting).most_common(MAX_ROWS)
    ]


def _with_groups(requests: Sequence[RunningRequest]) -> list[RunningRequest]:
    """Replace `group`, the id of a shared block, by 0, 1, ..., because block ids would show other tenants' activity."""
    groups: dict[int, int] = {}
    return [
        each if each.group is None else replace(each, group=groups.setdefault(each.group, len(groups)))
        for each in requests
    ]


@ENDPOINTS.add(
    "GET", "/v1/scheduler", "Show the running and waiting requests, slots and KV blocks", answer=SchedulerView
)
async def show_scheduler(engine: AsyncEngine, http_request: Request) -> Response:
    states = await engine.lookup.scheduler_states()
    known = {index: state for index, state in states.items() if state is not None}
    silent, tenant = [index for index, state in states.items() if state is None], tenant_seen(http_request)

    def answer() -> Response:
        return json_response(view_of(known, silent, engine.config.scheduler.policy, tenant))

    return await asyncio.to_thread(answer)
