"""Operations on open requests (cancel, change priority), on replicas (drain, join) and on adapters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from llm_serving.admission.validation import check_priority
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.engine import request_lookup
from llm_serving.engine.adapters import Adapter, AdapterRegistry
from llm_serving.engine.coalescing import CoalescedResponse
from llm_serving.engine.open_requests import OpenRequest
from llm_serving.engine.replicas import ReplicaState
from llm_serving.engine.request_dispatcher import RequestDispatcher
from llm_serving.engine.request_lookup import RequestLookup
from llm_serving.errors import UnavailableError, WorkerDiedError
from llm_serving.log import get_logger
from llm_serving.observability.event_log import client_ids

logger = get_logger(__name__)

DROP_DELAY_S: Final = 0.1
"""Seconds between two checks of `drop_adapter` whether the adapter's last request has ended."""


class ReplicaRow(NamedTuple):
    """State of a replica, for an operator."""

    replica: int
    state: ReplicaState
    num_unfinished: int
    machine: str = ""
    """Address of the WorkAgent's machine; empty: the master's machine."""


class Control:
    """Operations on open requests, replicas and adapters. Only the event loop may call them.

    `request_id` is the client's id of a request, or the id of a response. `tenant` limits an operation to the requests
    of a tenant; None: all tenants.
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
        unfinished = self._num_of_adapter(adapter.number)
        if registry.is_offered(adapter.number):  # the same files, under another name
            registry.forget(adapter)
        elif unfinished:
            asyncio.get_running_loop().call_later(DROP_DELAY_S, self.drop_adapter, registry, adapter)
        else:
            registry.forget(adapter)
            self._tell(adapter.number, "")
        return unfinished

    def check_adapter(self, registry: AdapterRegistry, number: int) -> None:
        """Start to check the files of the adapters with this number, and return. If files were changed or removed, the
        adapter is unloaded, because a WorkAgent that restarts could not read them.
        """

        async def check() -> None:
            for adapter in await asyncio.to_thread(registry.find_changed, number):
                logger.error("adapter %s is unloaded: its files in %s have changed", adapter.name, adapter.folder)
                if registry.remove(adapter.name) is not None:
                    self.drop_adapter(registry, adapter)

        task = asyncio.get_running_loop().create_task(check())
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def _num_of_adapter(self, number: int) -> int:
        return sum(each.request.adapter == number for each in self._requests.by_id.values())

    def _tell(self, number: int, folder: str) -> None:
        for engine in list(self._replicas.engines.values()):
            with contextlib.suppress(WorkerDiedError):  # a restarted WorkAgent gets the adapters of the registry
                engine.set_adapter(number, folder)

    def cancel(self, request_id: str, tenant: str | None = None) -> list[str]:
        """Cancel the requests with this id. Return the engine's ids of those that were unfinished.

        Each of them gets its final output, with finish reason `abort`, before the next step. If other clients share the
        answer, only this client's stream ends. Raise RequestNotFoundError if the tenant has no such request.
        """
        found = self._lookup.find(request_id, tenant)
        for each in found:
            shared = each.stream if isinstance(each.stream, CoalescedResponse) else None
            if shared is None or not shared.cancel(client_ids(request_id)):
                each.is_cancelled = True
                each.engine.abort(each.request.request_id)
        return [each.request.request_id for each in found]

    async def set_priority(self, request_id: str, priority: int, tenant: str | None = None) -> dict[str, bool]:
        """Change the priority of the requests with this id. Return engine id -> whether the priority is in effect now,
        for each unfinished request.

        Raises:
            RequestError: The priority is out of range.
            RequestNotFoundError: The tenant has no such request.
            UnavailableError: The engine did not answer in time, because its WorkAgent is restarting.
        """
        check_priority(priority)
        done: dict[str, bool] = {}
        found = self._lookup.find(request_id, tenant)
        while found:
            records = [each.request for each in found]
            done |= await self._set_priorities(found, priority)
            asked = zip(found, records, strict=True)  # a request may have migrated before its engine got the message
            found = [each for each, record in asked if self._has_moved(each, record) and not done.get(_id_of(each))]
        return done

    async def _set_priorities(self, requests: Sequence[OpenRequest], priority: int) -> dict[str, bool]:
        """Change priorities in the engines. For a migrating request, store the priority for its next engine."""
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
            await asyncio.wait(asked.values(), timeout=request_lookup.STATE_TIMEOUT_S)
        if not all(answer.done() for answer in asked.values()):
            limit = f"{request_lookup.STATE_TIMEOUT_S:g} s"
            raise UnavailableError(
                f"the engine did not confirm the new priority within {limit}; the engine may still apply it"
            )
        done = {engine_id: answer.result() for engine_id, answer in asked.items()}
        return done | {_id_of(each): True for each in in_transfer}

    def replica_rows(self) -> list[ReplicaRow]:
        engines = self._replicas.engines
        return [
            ReplicaRow(
                index,
                self._replicas.state(index),
                self._requests.num_of(engines[index]) if index in engines else 0,
                engines[index].machine if index in engines else "",
            )
            for index in range(len(self._replicas))
        ]

    def drain(self, replica: int) -> None:
        """Route no further requests to a replica, then stop it. Raise RequestError for the last open replica."""
        self._replicas.drain(replica)
        if (engine := self._replicas.engines.get(replica)) is not None:
            self._dispatcher.leave_if_idle(engine)

    def join(self, replica: int) -> None:
        """Route requests to a drained replica again; load it if it has stopped. Raise RequestError for a bad index."""
        self._replicas.join(replica)

    def _has_moved(self, opened: OpenRequest, record: Request) -> bool:
        """Return whether a request has migrated. `record`: its object in the engine that had the request before."""
        has_left = opened.is_in_transfer or opened.request is not record
        return has_left and self._requests.by_id.get(_id_of(opened)) is opened

    def _update_queue(self, opened: OpenRequest, request_class: RequestClass, answer: asyncio.Future[bool]) -> None:
        """Move a request to its new class in admission control, once the scheduler's `answer` is True."""
        if not answer.cancelled() and answer.exception() is None and answer.result():
            self._queue.change_class(_id_of(opened), request_class)


def _id_of(opened: OpenRequest) -> str:
    return opened.request.request_id
