"""What is done to requests by their id (they are ended, or get another priority) and to replicas (leave, join)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import NamedTuple

from llm_serving.admission.queue_limits import AdmissionQueue
from llm_serving.admission.validation import check_priority
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass, class_of
from llm_serving.engine import request_lookup
from llm_serving.engine.coalescing import CoalescedResponse
from llm_serving.engine.engine import Engine
from llm_serving.engine.open_requests import OpenRequest, OpenRequests
from llm_serving.engine.replicas import Replicas, ReplicaState
from llm_serving.engine.request_lookup import RequestLookup
from llm_serving.errors import UnavailableError, WorkerDiedError
from llm_serving.observability.event_log import client_ids


class ReplicaRow(NamedTuple):
    """A replica, as an operator sees it."""

    replica: int
    state: ReplicaState
    num_unfinished: int
    """Requests that it has."""
    machine: str = ""
    """Address of the one on which its WorkAgent runs, or ran; empty: the master's own."""


class Control:
    """Lives on the event loop.

    A `tenant` is who asks and controls its own requests only; None controls everybody's. A `request_id` is the
    client's, alone or as the id of an answer.
    """

    def __init__(
        self,
        config: ServingConfig,
        known: RequestLookup,
        replicas: Replicas,
        queue: AdmissionQueue,
        requests: OpenRequests,
    ) -> None:
        self._config = config
        self._known = known
        self._replicas = replicas
        self._queue = queue
        self._requests = requests

    def cancel(self, request_id: str, tenant: str | None = None) -> list[str]:
        """Ends every request that a client means by this id.

        Each gets its last piece, with the finish reason `abort`, and its blocks are free, as soon as the engine has
        taken notice. Where others get the same answer too, it ends for this one alone. One that is the client's and
        has ended, as far as that is remembered, is no error.

        Returns:
            Ids of the requests that end by this.

        Raises:
            RequestNotFoundError: Nobody knows of such a request, or it is another tenant's.
        """
        found = self._known.find(request_id, tenant)
        for each in found:
            shared = each.stream if isinstance(each.stream, CoalescedResponse) else None
            if shared is None or not shared.cancel(client_ids(request_id)):
                each.is_cancelled = True
                each.engine.abort(each.request.request_id)
        return [each.request.request_id for each in found]

    async def reprioritise(self, request_id: str, priority: int, tenant: str | None = None) -> dict[str, bool]:
        """Gives every request that a client means by this id another priority; that the caller may ask for.

        Returns:
            Of each request that lives whether it has the priority now, see `Scheduler.reprioritise`.

        Raises:
            RequestError: No request can have such a priority.
            RequestNotFoundError: Nobody knows of such a request, or it is another tenant's.
            UnavailableError: A WorkAgent is started again, and the engine did not answer in time.
        """
        check_priority(priority)
        done: dict[str, bool] = {}
        found = self._known.find(request_id, tenant)
        while found:
            records = [each.request for each in found]
            done |= await self._ask(found, priority)
            asked = zip(found, records, strict=True)  # some may have moved before they were asked for
            found = [each for each, record in asked if self._has_moved(each, record) and not done.get(_id_of(each))]
        return done

    async def _ask(self, requests: Sequence[OpenRequest], priority: int) -> dict[str, bool]:
        """Whether each has the priority now where it is; one that is on its way has it where it comes."""
        request_class = class_of(priority, self._config.request_classes)
        in_transfer = [each for each in requests if each.is_in_transfer]
        for each in in_transfer:
            each.priority = priority
            self._queue.change_class(_id_of(each), request_class)
        asked: dict[str, asyncio.Future[bool]] = {}
        for each in requests:
            if each.is_in_transfer:
                continue
            question = functools.partial(each.engine.reprioritise, _id_of(each), priority)
            with contextlib.suppress(WorkerDiedError):
                answer = asked[_id_of(each)] = asyncio.wrap_future(each.engine.ask(question))
                # When it comes, and not when it is read: nobody may be waiting for it any more.
                answer.add_done_callback(functools.partial(self._answered, each, request_class))
        if asked:
            await asyncio.wait(asked.values(), timeout=request_lookup.STATE_TIMEOUT_S)
        if not all(answer.done() for answer in asked.values()):
            limit = f"{request_lookup.STATE_TIMEOUT_S:g} s"
            raise UnavailableError(f"the engine did not answer within {limit}; it may do so later")
        done = {engine_id: answer.result() for engine_id, answer in asked.items()}
        return done | {_id_of(each): True for each in in_transfer}

    def replica_rows(self) -> list[ReplicaRow]:
        """Every replica: what it does, and how many requests it has."""
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
        """The replica gets no further requests, finishes those it has, and leaves: its WorkAgent ends.

        Raises:
            RequestError: There is no such replica, or no other would be left that serves.
        """
        self._replicas.drain(replica)
        if (engine := self._replicas.engines.get(replica)) is not None:
            self.ended_at(engine)

    def join(self, replica: int) -> None:
        """A drained replica gets requests again; one that has left is loaded first.

        Raises:
            RequestError: There is no such replica.
        """
        self._replicas.join(replica)

    def ended_at(self, engine: Engine) -> None:
        """A request has ended there: a drained replica leaves with its last one."""
        if not self._requests.num_of(engine) and (replica := self._replicas.index_of(engine)) is not None:
            self._replicas.leave(replica)

    def _has_moved(self, opened: OpenRequest, record: Request) -> bool:
        """Since its engine knew it by this record, perhaps back to that engine."""
        has_left = opened.is_in_transfer or opened.request is not record
        return has_left and self._requests.get(_id_of(opened)) is opened

    def _answered(self, opened: OpenRequest, request_class: RequestClass, answer: asyncio.Future[bool]) -> None:
        """What the door counts follows what the scheduler did."""
        if not answer.cancelled() and answer.exception() is None and answer.result():
            self._queue.change_class(_id_of(opened), request_class)


def _id_of(opened: OpenRequest) -> str:
    return opened.request.request_id
