"""Reads the state of requests and schedulers, for explanations, timelines and snapshots."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from llm_serving.config.schema import ServingConfig
from llm_serving.core.timings import Clock
from llm_serving.engine.engine import Engine
from llm_serving.engine.open_requests import OpenRequest, OpenRequests
from llm_serving.engine.replicas import Replicas
from llm_serving.errors import RequestNotFoundError, WorkerDiedError
from llm_serving.observability.event_log import RequestRecord, client_ids
from llm_serving.observability.latency_breakdown import Explanation, answers_to, explain
from llm_serving.observability.snapshot import EngineSnapshot, SchedulerState
from llm_serving.observability.timeline import JsonObject, ReplicaTrace, trace

T = TypeVar("T")

STATE_TIMEOUT_S: Final = 5.0
"""Maximum seconds to wait for an engine. An engine whose WorkAgent restarts answers later."""


class RequestLookup:
    """Reads the event logs and schedulers of all replicas.

    `request_id` is the client's id of a request, or the id of a response. `tenant` limits a lookup to the requests of a
    tenant; None: all tenants.
    """

    def __init__(self, config: ServingConfig, replicas: Replicas, requests: OpenRequests, clock: Clock) -> None:
        self._config = config
        self._replicas = replicas
        self._requests = requests
        self._clock = clock
        self._states: dict[int, asyncio.Future[SchedulerState]] = {}
        self._snapshots: dict[int, asyncio.Future[EngineSnapshot]] = {}

    def find(self, request_id: str, tenant: str | None) -> list[OpenRequest]:
        """Return the open requests with an id; empty: all of them have ended. Only the event loop may call this.

        Raise RequestNotFoundError if no known request has this id, or if it belongs to another tenant.
        """
        found, ids = self._requests.find(request_id, tenant), self._ids(request_id)
        if not found and not any(_records(engine, ids, tenant) for engine in list(self._replicas.engines.values())):
            num_kept = self._config.serving.explain_requests
            rule = f"must be that of a request that lives or is among the newest {num_kept} that ended"
            raise RequestNotFoundError("request_id", f"{rule} (serving_config.explain_requests)", request_id)
        return found

    async def scheduler_states(self) -> dict[int, SchedulerState | None]:
        """Return the scheduler state of each replica between two steps; None: no answer within `STATE_TIMEOUT_S`."""
        return await self._ask_all(self._states, lambda engine: engine.state, STATE_TIMEOUT_S)

    async def snapshots(self, since: float, timeout_s: float) -> dict[int, EngineSnapshot | None]:
        """Return the scheduler state of each replica with its events since a time, for clients that poll."""
        return await self._ask_all(self._snapshots, lambda engine: partial(engine.take_snapshot, since), timeout_s)

    async def _ask_all(
        self, asked: dict[int, asyncio.Future[T]], question: Callable[[Engine], Callable[[], T]], timeout_s: float
    ) -> dict[int, T | None]:
        """Call a function in each engine, and return the results. Skip engines whose earlier call is pending."""
        living = self._replicas.living()
        for index, engine in living.items():
            before = asked.get(index)
            if before is None or before.done():
                asked.pop(index, None)
                with contextlib.suppress(WorkerDiedError):
                    asked[index] = asyncio.wrap_future(engine.ask(question(engine)))
        pending = {index: asked[index] for index in living if index in asked}
        if pending:
            await asyncio.wait(pending.values(), timeout=timeout_s)
        return {index: answer.result() if answer.done() else None for index, answer in pending.items()}

    def explain(self, request_id: str, tenant: str | None = None) -> list[Explanation]:
        """Return the latency breakdown of each request with this id. Thread-safe."""
        found, ids = [], self._ids(request_id)
        with_tenant = bool(self._config.api_keys)
        for index, engine in sorted(self._replicas.engines.items()):
            records = _records(engine, ids, tenant)
            if records:
                events = engine.event_log.snapshot(self._clock())
                bounds = {each.name: each for each in engine.scheduler.bounds}
                found += [
                    explain(
                        record,
                        events,
                        bounds[record.request_class.name],
                        index,
                        with_tenant=with_tenant,
                        step_s=engine.mean_step_s,
                    )
                    for record in records
                ]
        return found

    def timeline(self, num_steps: int, tenant: str | None = None) -> JsonObject:
        """Return a trace of each replica's latest steps. `tenant`: show only this tenant's requests. Thread-safe."""
        return trace(
            [
                ReplicaTrace(
                    index,
                    engine.event_log.snapshot(self._clock()),
                    [record for record in engine.event_log.records() if tenant in (None, record.tenant)],
                    own_steps_only=tenant is not None,
                    machine=engine.machine,
                )
                for index, engine in sorted(self._replicas.engines.items())
            ],
            num_steps,
        )

    def _ids(self, request_id: str) -> list[str]:
        """Return the id itself, and the engine's ids of the requests whose answers the client's requests got."""
        return [request_id, *self._requests.coalesced_with(request_id)]


def _records(engine: Engine, ids: Sequence[str], tenant: str | None) -> list[RequestRecord]:
    names = frozenset(name for each in ids for name in client_ids(each))
    return [each for each in engine.event_log.records() if tenant in (None, each.tenant) and answers_to(each, names)]
