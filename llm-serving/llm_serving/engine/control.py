"""Operations on requests, replicas and adapters for clients and operators: explain, cancel, change priority, drain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from msgspec import Struct

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.core.timings import Clock
from llm_serving.engine.adapters import Adapter, AdapterRegistry
from llm_serving.engine.engine import Engine
from llm_serving.engine.open_requests import OpenRequest, OpenRequests
from llm_serving.engine.replicas import Replicas, ReplicaState
from llm_serving.engine.request_dispatcher import RequestDispatcher
from llm_serving.engine.request_stream import CoalescedResponse
from llm_serving.errors import RequestNotFoundError, UnavailableError, WorkerDiedError
from llm_serving.log import get_logger
from llm_serving.observability.event_log import RequestRecord, client_ids
from llm_serving.observability.latency_breakdown import Explanation, answers_to, explain
from llm_serving.observability.snapshot import EngineSnapshot, SchedulerState
from llm_serving.observability.timeline import JsonObject, ReplicaTrace, trace

T = TypeVar("T")

logger = get_logger(__name__)

STATE_TIMEOUT_S: Final = 5.0
"""Maximum seconds to wait for an engine. An engine whose WorkAgent restarts answers later."""
DROP_DELAY_S: Final = 0.1
"""Seconds between two checks whether the last request of an unloaded adapter has ended."""


class RequestLookup:
    """Finds requests, and reads the events and states of all replicas. `Control` explains `request_id` and `tenant`."""

    def __init__(self, config: ServingConfig, replicas: Replicas, requests: OpenRequests, clock: Clock) -> None:
        self._config = config
        self._replicas = replicas
        self._requests = requests
        self._clock = clock
        self._states: dict[int, asyncio.Future[SchedulerState]] = {}
        self._snapshots: dict[int, asyncio.Future[EngineSnapshot]] = {}

    def find(self, request_id: str, tenant: str | None) -> list[OpenRequest]:
        """Return the open requests with this id. Raise RequestNotFoundError if no request, open or logged, has it."""
        found, ids = self._requests.find(request_id, tenant), self._ids(request_id)
        if not found and not any(_records(engine, ids, tenant) for engine in list(self._replicas.engines.values())):
            num_kept = self._config.serving.explain_requests
            rule = f"must be the id of an unfinished request or of one of the latest {num_kept} that ended"
            raise RequestNotFoundError("request_id", f"{rule} (serving_config.explain_requests)", request_id)
        return found

    async def scheduler_states(self) -> dict[int, SchedulerState | None]:
        """Return each replica's scheduler state between two steps, or None if no reply comes in `STATE_TIMEOUT_S`."""
        return await self._ask_all(self._states, lambda engine: engine.state, STATE_TIMEOUT_S)

    async def snapshots(self, since: float, timeout_s: float) -> dict[int, EngineSnapshot | None]:
        return await self._ask_all(self._snapshots, lambda engine: partial(engine.take_snapshot, since), timeout_s)

    async def _ask_all(
        self, asked: dict[int, asyncio.Future[T]], question: Callable[[Engine], Callable[[], T]], timeout_s: float
    ) -> dict[int, T | None]:
        """Call a function in each engine's thread. Return, by replica, its result, or None without a reply in time.

        `question(engine)` returns the function. `asked` holds earlier calls that have no reply yet. For an engine with
        such a call, wait for that call instead of making another.
        """
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
        """Return a trace of each replica's latest steps, restricted to `tenant` if that is given. Thread-safe."""
        return trace(
            [
                ReplicaTrace(
                    index,
                    engine.event_log.snapshot(self._clock()),
                    [record for record in engine.event_log.records() if tenant in (None, record.tenant)],
                    own_steps_only=tenant is not None,
                    machine=engine.executor.machine,
                )
                for index, engine in sorted(self._replicas.engines.items())
            ],
            num_steps,
        )

    def _ids(self, request_id: str) -> list[str]:
        return [request_id, *self._requests.coalesced_with(request_id)]


def _records(engine: Engine, ids: Sequence[str], tenant: str | None) -> list[RequestRecord]:
    names = frozenset(name for each in ids for name in client_ids(each))
    return [each for each in engine.event_log.records() if tenant in (None, each.tenant) and answers_to(each, names)]


class ReplicaView(Struct):
    replica: int
    state: ReplicaState
    """`draining`: the replica finishes its requests. `left`: its WorkAgent has exited after that."""
    num_unfinished: int
    machine: str = ""
    """Address of the WorkAgent's machine. Empty if it runs on the master's machine."""


class Control:
    """Operations on open requests, replicas and adapters. Only the event loop may call them. `request_id` is a client's
    id of a request or the id of a response. `tenant` None means the requests of all tenants.
    """

    def __init__(self, config: ServingConfig, lookup: RequestLookup, dispatcher: RequestDispatcher) -> None:
        self._config = config
        self._lookup = lookup
        self._dispatcher = dispatcher
        self._checks: set[asyncio.Task[None]] = set()
        self._replicas, self._requests, self._queue = dispatcher.replicas, dispatcher.requests, dispatcher.queue

    def add_adapter(self, registry: AdapterRegistry, adapter: Adapter) -> None:
        """Load an adapter into all WorkAgents, and offer it to new requests. Raise ModelError if there are too many."""
        registry.add(adapter)
        self._tell(adapter.number, str(adapter.folder))

    def drop_adapter(self, registry: AdapterRegistry, adapter: Adapter) -> int:
        """Unload a removed adapter once its last request has ended. Return the number of its unfinished requests."""
        unfinished = sum(each.request.adapter == adapter.number for each in self._requests.by_id.values())
        if registry.is_offered(adapter.number):  # the same adapter is offered under another name
            registry.forget(adapter)
        elif unfinished:
            asyncio.get_running_loop().call_later(DROP_DELAY_S, self.drop_adapter, registry, adapter)
        else:
            registry.forget(adapter)
            self._tell(adapter.number, "")
        return unfinished

    def check_adapter(self, registry: AdapterRegistry, number: int) -> None:
        """In the background, unload the adapter if its files have changed, since no WorkAgent could load it again."""

        async def check() -> None:
            for adapter in await asyncio.to_thread(registry.find_changed, number):
                if registry.by_name.get(adapter.name) is adapter:  # else it was replaced while its files were read
                    logger.error("adapter %s is unloaded: its files in %s have changed", adapter.name, adapter.folder)
                    registry.remove(adapter.name)
                    self.drop_adapter(registry, adapter)

        task = asyncio.get_running_loop().create_task(check())
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def _tell(self, number: int, folder: str) -> None:
        for engine in list(self._replicas.engines.values()):
            with contextlib.suppress(WorkerDiedError):  # a restarted WorkAgent gets the adapters of the registry
                engine.set_adapter(number, folder)

    def cancel(self, request_id: str, tenant: str | None = None) -> list[str]:
        """Cancel the requests with this id. Return the engine's ids of those that were unfinished.

        Each of them gets its final output, with finish reason `abort`, before the next step. If other clients share the
        answer, a client's id ends only the stream of that client, and the engine's id ends the answer for all clients.
        Raise RequestNotFoundError if the tenant has no such request.
        """
        found = self._lookup.find(request_id, tenant)
        for each in found:
            stream = each.stream if request_id != _id_of(each) else None
            if not (isinstance(stream, CoalescedResponse) and stream.cancel(client_ids(request_id))):
                each.is_cancelled = True
                self._dispatcher.discard_coalesced(each)
                each.engine.abort(each.request.request_id)
        return [each.request.request_id for each in found]

    async def set_priority(self, request_id: str, priority: int, tenant: str | None = None) -> dict[str, bool]:
        """Set the priority of all requests with this id. Return {request id in the engine: whether this worked}."""
        done: dict[str, bool] = {}
        found = self._lookup.find(request_id, tenant)
        while found:
            records = [each.request for each in found]
            done |= await self._set_priorities(found, priority)
            asked = zip(found, records, strict=True)  # a request may have migrated before its engine got the message
            found = [each for each, record in asked if self._has_moved(each, record) and not done.get(_id_of(each))]
        return done

    async def _set_priorities(self, requests: Sequence[OpenRequest], priority: int) -> dict[str, bool]:
        request_class = class_of(priority, self._config.request_classes)
        in_transfer = [each for each in requests if each.is_in_transfer]
        for each in in_transfer:
            each.priority = priority
            self._queue.change_class(_id_of(each), request_class)
        asked: dict[str, asyncio.Future[bool]] = {}
        for each in requests:
            if each.is_in_transfer:
                continue
            question = partial(each.engine.set_priority, _id_of(each), priority)
            with contextlib.suppress(WorkerDiedError):
                answer = asked[_id_of(each)] = asyncio.wrap_future(each.engine.ask(question))
                # A callback, because the engine may answer after this coroutine has timed out.
                answer.add_done_callback(partial(self._update_queue, each, request_class))
        if asked:
            await asyncio.wait(asked.values(), timeout=STATE_TIMEOUT_S)
        if not all(answer.done() for answer in asked.values()):
            limit = f"{STATE_TIMEOUT_S:g} s"
            raise UnavailableError(
                f"the engine did not confirm the new priority within {limit}; the engine may still apply it"
            )
        done = {engine_id: answer.result() for engine_id, answer in asked.items()}
        return done | {_id_of(each): True for each in in_transfer}

    def replica_views(self) -> list[ReplicaView]:
        engines = self._replicas.engines
        return [
            ReplicaView(
                index,
                self._replicas.state(index),
                self._requests.num_of[engines[index]] if index in engines else 0,
                engines[index].executor.machine if index in engines else "",
            )
            for index in range(len(self._replicas))
        ]

    def drain(self, replica: int) -> None:
        """Route no further requests to a replica; stop it once idle. Raise RequestError for the last open replica."""
        self._replicas.drain(replica)
        if (engine := self._replicas.engines.get(replica)) is not None:
            self._dispatcher.leave_if_idle(engine)

    def join(self, replica: int) -> None:
        """Route requests to a drained replica again. If it has stopped, load it. Raise RequestError for a bad index."""
        self._replicas.join(replica)

    def _has_moved(self, opened: OpenRequest, record: Request) -> bool:
        has_left = opened.is_in_transfer or opened.request is not record
        return has_left and self._requests.by_id.get(_id_of(opened)) is opened

    def _update_queue(self, opened: OpenRequest, request_class: RequestClass, answer: asyncio.Future[bool]) -> None:
        if not answer.cancelled() and answer.exception() is None and answer.result():
            self._queue.change_class(_id_of(opened), request_class)


def _id_of(opened: OpenRequest) -> str:
    return opened.request.request_id
