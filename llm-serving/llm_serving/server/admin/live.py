"""GET /v1/live: snapshots of all schedulers as server-sent events.

Snapshots are taken only while clients watch. They use at most `SHARE` (1 %) of one core. A client that reads slowly
gets only the latest snapshot. Each row is an array of values without names. The first event lists the columns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.core.timings import Clock
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.control import RequestLookup
from llm_serving.errors import CapacityError
from llm_serving.log import get_logger
from llm_serving.observability.event_log import RequestRecord, Step
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.snapshot import ClassQueueState, EngineSnapshot, RunningRequest, WaitingRequest
from llm_serving.server.admin.scheduler import Replica, SchedulerView, Tenant, view_of
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.events import EVENT_STREAM, STREAM_HEADERS, named_event
from llm_serving.server.generation.generation import ClientGoneError, run_until_client_leaves
from llm_serving.server.middleware.authentication import tenant_seen

DIGITS: Final = 4
logger = get_logger(__name__)
LEAST_PAUSE_S: Final = 0.25
MOST_PAUSE_S: Final = 10.0
SHARE: Final = 0.01
SEND_S: Final = 0.0002
"""Estimated CPU seconds to send one snapshot to one client, including TLS."""
TIMEOUT_S: Final = 1.0
"""Seconds to wait for an engine. A snapshot lists a replica without a reply as silent."""
RETRY_AFTER_S: Final = 10.0

ENDPOINTS: Final = Endpoints()


class EndedRequest(Struct, kw_only=True):
    """A request that has ended since the previous snapshot."""

    id: str
    request_class: str
    tenant: str
    reason: str | None
    seconds: float
    first_token: float | None
    prompt: int
    cached: int
    output: int
    preemptions: int


class ComputedStep(Struct, kw_only=True):
    """A step that has ended since the previous snapshot. For a tenant, it counts only the requests of that tenant."""

    number: int
    ended: float
    """Seconds on the same clock as `time` of the snapshot."""
    seconds: float
    """Seconds to its results, from its scheduling or from the end of the previous step, whichever is later."""
    prompts: int
    """Number of rows that computed parts of prompts, or recomputed tokens after a preemption."""
    prompt_tokens: int
    decoding: int


ROWS: Final[Mapping[str, type[Struct]]] = {
    "classes": ClassQueueState,
    "tenants": Tenant,
    "running_requests": RunningRequest,
    "waiting_requests": WaitingRequest,
    "ended": EndedRequest,
    "steps": ComputedStep,
}


def snapshot_event(
    number: int,
    time: float,
    snapshots: Mapping[int, EngineSnapshot | None],
    policy: str,
    tenant: str | None,
    metrics: Metrics,
) -> bytes:
    known = {index: each for index, each in snapshots.items() if each is not None}
    silent = [index for index, each in snapshots.items() if each is None]
    view: SchedulerView = view_of({index: each.state for index, each in known.items()}, silent, policy, tenant)
    return named_event(
        "picture",
        {
            "number": number,
            "time": round(time, DIGITS),
            "totals": {**metrics.totals()._asdict(), "bound_violations": metrics.num_bound_violations},
            "kept": metrics.classes.targets_met(),
            "replicas": [
                _replica(each, known[each.replica], tenant)
                | {"machine": metrics.machine(each.replica) if tenant is None else ""}
                for each in view.replicas
            ],
            "silent": silent,
        },
    )


def _replica(view: Replica, seen: EngineSnapshot, tenant: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "replica": view.replica,
        "step": view.step,
        "policy": view.policy,
        "slots": view.slots,
        "budget": seen.max_step_tokens,
        "step_s": seen.step_s,
        "running": view.running,
        "waiting": view.waiting,
        "blocks": view.blocks,
        "saved": sum(each.blocks for each in seen.state.running.values()) - view.blocks.used,
    }
    own = _visible_sequences(seen, tenant)
    lists: dict[str, Sequence[Struct]] = {
        "classes": view.classes,
        "tenants": view.tenants,
        "running_requests": view.running_requests,
        "waiting_requests": view.waiting_requests,
        "ended": [_ended(record) for record in seen.ended if tenant in (None, record.tenant)],
        "steps": _steps(seen.steps, own),
    }
    return row | {name: [_values(each) for each in rows] for name, rows in lists.items()}


def _values(row: Struct) -> list[Any]:
    return [round(value, DIGITS) if isinstance(value, float) else value for value in msgspec.structs.astuple(row)]


def _visible_sequences(seen: EngineSnapshot, tenant: str | None) -> frozenset[int] | None:
    """Return the `Request.sequence` of a tenant's unfinished and just ended requests, or None if `tenant` is None."""
    if tenant is None:
        return None
    running = [sequence for sequence, row in seen.state.running.items() if row.tenant == tenant]
    waiting = [sequence for sequence, row in seen.state.waiting.items() if row.tenant == tenant]
    return frozenset(running + waiting).union(*(record.sequences for record in seen.ended if record.tenant == tenant))


def _ended(record: RequestRecord) -> EndedRequest:
    summary, first_token_time = record.summary, record.first_token_time
    ended = record.arrival_time if record.ended_time is None else record.ended_time
    return EndedRequest(
        id=record.request_id,
        request_class=record.request_class.name,
        tenant=record.tenant,
        reason=summary.finish_reason,
        seconds=ended - record.arrival_time,
        first_token=None if first_token_time is None else first_token_time - record.arrival_time,
        prompt=summary.num_prompt_tokens,
        cached=summary.num_cached_tokens,
        output=summary.num_output_tokens,
        preemptions=summary.num_preemptions,
    )


def _steps(steps: Sequence[tuple[float, Step]], own: frozenset[int] | None) -> list[ComputedStep]:
    found = []
    for began, step in steps:
        chunks = [chunk for chunk in step.chunks if own is None or chunk[0] in own]
        decoding = len(step.singles) if own is None else sum([each in own for each in step.singles])
        if own is None or chunks or decoding:
            found.append(
                ComputedStep(
                    number=step.number,
                    ended=step.ended,
                    seconds=step.ended - began,
                    prompts=len(chunks),
                    prompt_tokens=sum([count for _, _, count in chunks]),
                    decoding=decoding,
                )
            )
    return found


@dataclass(eq=False)
class Viewer:
    """A client that watches. It sees the requests of `tenant`, or of all tenants if `tenant` is None."""

    tenant: str | None
    num_dropped: int = 0
    _newest: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(1))

    def show(self, snapshot: bytes | None) -> None:
        """Replace the snapshot that the client has not received yet. None ends the stream."""
        if self._newest.full():
            self._newest.get_nowait()
            self.num_dropped += 1
        self._newest.put_nowait(snapshot)

    async def next(self) -> bytes | None:
        """Wait for the next snapshot for the client and return it. Return None if the stream has ended."""
        return await self._newest.get()


@dataclass(eq=False)
class LiveFeed:
    """Takes snapshots of the scheduler while clients watch, and sends them. Only the event loop may use it."""

    lookup: RequestLookup
    metrics: Metrics
    policy: str
    max_viewers: int
    """Maximum number of clients that watch. A tenant may have at most half of them."""
    clock: Clock
    cpu_clock: Clock = time.thread_time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _viewers: list[Viewer] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _number: int = 0
    _closed: bool = False

    def join(self, tenant: str | None) -> Viewer:
        """Add a client. Call `leave` to remove it. Raise CapacityError if there are too many clients."""
        most = self.max_viewers
        if self._closed or len(self._viewers) >= most:
            rule = f"{most} clients are already watching /v1/live (serving_config.max_live_viewers)"
            raise CapacityError(rule, RETRY_AFTER_S)
        if tenant is not None and Counter(each.tenant for each in self._viewers)[tenant] >= max(1, most // 2):
            rule = "half of serving_config.max_live_viewers"
            raise CapacityError(
                f"{max(1, most // 2)} clients with this key are already watching /v1/live ({rule})", RETRY_AFTER_S
            )
        viewer = Viewer(tenant)
        self._viewers.append(viewer)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.remove(viewer)
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End all streams, because the server would not exit while they are open."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        for viewer in self._viewers:
            viewer.show(None)

    async def _run(self) -> None:
        since = self.clock()
        while True:
            try:
                snapshots = await self.lookup.snapshots(since, TIMEOUT_S)
                since = min((each.state.now for each in snapshots.values() if each is not None), default=since)
                spent_s = await self._show(snapshots)
            except Exception:
                logger.exception("Failed to take a snapshot of the engines for GET /v1/live")
                spent_s = MOST_PAUSE_S
            await self.sleep(pause_s(spent_s))

    async def _show(self, snapshots: Mapping[int, EngineSnapshot | None]) -> float:
        self._number += 1
        now = self.clock()
        spent_s = sum(each.cpu_s for each in snapshots.values() if each is not None)
        for tenant in dict.fromkeys(each.tenant for each in self._viewers):
            began = self.cpu_clock()
            snapshot = snapshot_event(self._number, now, snapshots, self.policy, tenant, self.metrics)
            spent_s += self.cpu_clock() - began
            for viewer in self._viewers:
                if viewer.tenant == tenant:
                    viewer.show(snapshot)
                    spent_s += SEND_S
            await asyncio.sleep(0)  # lets other tasks run between two tenants
        return spent_s


def pause_s(spent_s: float) -> float:
    return min(MOST_PAUSE_S, max(LEAST_PAUSE_S, spent_s / SHARE))


@ENDPOINTS.add("GET", "/v1/live", "Stream the state of the schedulers as server-sent events")
async def watch(engine: AsyncEngine, http_request: Request) -> Response:
    return _LiveResponse(http_request.app.live, tenant_seen(http_request))


class _LiveResponse(Response):
    def __init__(self, feed: LiveFeed, tenant: str | None) -> None:
        self._feed = feed
        self._viewer = feed.join(tenant)
        self.status_code = 200
        self.media_type = EVENT_STREAM
        self.background = None
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._with_body = scope["method"] != "HEAD"
        try:
            with contextlib.suppress(ClientGoneError):
                await run_until_client_leaves(receive, self._send_all(send))
        finally:
            self._feed.leave(self._viewer)

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        columns = named_event("columns", {name: kind.__struct_fields__ for name, kind in ROWS.items()})
        await send({"type": "http.response.body", "body": columns, "more_body": True})
        # A HEAD request ends here: its response has no body, and its client may stay connected.
        while self._with_body and (snapshot := await self._viewer.next()) is not None:
            await send({"type": "http.response.body", "body": snapshot, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
