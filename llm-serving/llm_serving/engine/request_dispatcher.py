"""Handles on the event loop what engines report of open requests: outputs, starts, migrations and failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from llm_serving.admission.admission_control import AdmissionControl
from llm_serving.admission.queue_limits import AdmissionQueue
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.migration import MigratingRequest, failure_output
from llm_serving.engine.fleet.router import Router
from llm_serving.engine.open_requests import OpenRequest, OpenRequests
from llm_serving.engine.replicas import Events, OpenReplica, Replicas
from llm_serving.engine.request_stream import CoalescedResponse, CoalescedResponses
from llm_serving.errors import LLMServingError, WorkerDiedError
from llm_serving.log import get_logger
from llm_serving.observability.metrics import Metrics

logger = get_logger(__name__)


class RequestDispatcher:
    """Connects open requests with replicas, on the event loop. An exception ends only the request that it concerns."""

    def __init__(
        self,
        config: ServingConfig,
        metrics: Metrics,
        open_replica: OpenReplica,
        clock: Clock,
        on_failure: Callable[[LLMServingError], None],
    ) -> None:
        self.requests = OpenRequests()
        self.queue = AdmissionQueue(config, clock)
        events = Events(
            on_outputs=self.dispatch,
            on_started=self.queue.start,
            on_migrating=self.migrate,
            on_failure=on_failure,
            on_ended=self.end_requests_of,
            on_serving=self.leave_if_idle,
        )
        self.replicas = Replicas(config, open_replica, events)
        self.admission = AdmissionControl(config, self.queue, metrics.classes, clock)
        self.router = Router(config, self.replicas, self.requests, self.queue, self.admission, clock)
        self.on_adapter_error: Callable[[int], None] = lambda number: None
        serving = config.serving
        self.coalesced = CoalescedResponses(serving.coalesced_response_bytes, serving.request_log_age_s, clock)

    def reload(self, config: ServingConfig) -> None:
        for each in (self.queue, self.admission, self.router):
            each.reload(config)

    # --- one request ------------------------------------------------------------------------------------------------

    def close(self, request_id: str) -> OpenRequest | None:
        """Remove a request that has finished or is aborted. Return it, or None if it was not open."""
        self.queue.remove(request_id)
        if request_id in self.router.prompts.requests:
            self.router.prompts.remove(request_id)
        opened = self.requests.pop(request_id)
        if opened is not None and self.replicas.drained:
            self.leave_if_idle(opened.engine)
        return opened

    def abort(self, request_id: str) -> None:
        """Abort a request. Its tenant's slot stays occupied until the replica frees it."""
        opened = self.close(request_id)
        if opened is not None:
            self.discard_coalesced(opened)
            opened.engine.abort(request_id)

    def extend_deadline(self, request_id: str, deadline: float | None) -> None:
        opened = self.requests.by_id.get(request_id)
        if opened is not None:
            opened.deadline = deadline
            with contextlib.suppress(WorkerDiedError):  # then all requests of the engine have ended
                opened.engine.ask(partial(opened.engine.extend_deadline, request_id, deadline))

    def discard_coalesced(self, opened: OpenRequest) -> None:
        """Stop sharing a request's answer with clients that send the same request, because it will stay incomplete."""
        if isinstance(opened.stream, CoalescedResponse):
            self.coalesced.forget(opened.stream)

    def _fail(self, opened: OpenRequest, error: Exception) -> None:
        request_id = opened.request.request_id
        piece = failure_output(opened.request, FinishReason.ERROR, f"internal error: {error}")
        for call in (
            partial(opened.engine.abort, request_id),
            partial(self.close, request_id),
            partial(self.discard_coalesced, opened),
            partial(opened.stream.put, piece),
        ):
            with contextlib.suppress(Exception):
                call()

    # --- events of replicas -----------------------------------------------------------------------------------------

    def dispatch(self, pieces: list[RequestOutput]) -> None:
        by_id = self.requests.by_id
        for piece in pieces:
            opened = by_id.get(piece.request_id)
            if opened is None:
                continue
            try:
                if piece.finish_reason is not None:
                    self.close(piece.request_id)
                    if piece.finish_reason is FinishReason.ERROR and opened.request.adapter:
                        self.on_adapter_error(opened.request.adapter)
                    if piece.request_id in (slots := self.replicas.accounting.tenant_slots).migrating:
                        slots.end_migration(piece.request_id)
                opened.stream.put(piece)
            except Exception as error:
                logger.exception("an output of request %s was not delivered", piece.request_id)
                self._fail(opened, error)

    def end_requests_of(self, engine: Engine) -> None:
        """End the open requests of an engine that has ended. An exception in the engine may have left some open."""
        for opened in list(self.requests.by_id.values()):
            if opened.engine is engine and not opened.is_in_transfer:
                self._end(opened.request, FinishReason.ERROR, f"the engine of the request has ended: {engine.dead}")

    def leave_if_idle(self, engine: Engine) -> None:
        if not self.requests.num_of[engine] and (replica := self.replicas.index_of(engine)) is not None:
            self.replicas.leave(replica)

    def migrate(self, requests: list[MigratingRequest]) -> None:
        for migrating in requests:
            try:
                self._migrate_one(migrating)
            except Exception as error:
                logger.exception("request %s was not migrated", migrating.request.request_id)
                self._fail_migration(migrating, error)

    def _migrate_one(self, migrating: MigratingRequest) -> None:
        request = migrating.request
        opened = self.requests.by_id.get(request.request_id)
        is_cancelled = opened is None or opened.is_cancelled
        if opened is not None:
            request.deadline = opened.deadline
            if opened.priority is not None:
                request.priority = opened.priority
        preferred = None if migrating.transferred is None else migrating.transferred.replica
        for target, target_engine in self.router.migration_targets(preferred):
            if request.max_num_tokens > target_engine.scheduler.blocks.max_request_tokens:
                continue  # cache sizes may differ; the replica that the request comes from has enough blocks
            replica = target if is_cancelled else self.replicas.transfer(migrating, target)
            if replica is None:
                self.requests.start_transfer(request.request_id, target_engine)
                return
            engine = self.replicas.engines[replica]
            with contextlib.suppress(WorkerDiedError):
                # A separate message for the cancellation could arrive after a step has finished the request.
                engine.take_over(migrating, is_cancelled=is_cancelled)
                if opened is not None:
                    before = opened.engine
                    self.requests.finish_migration(request.request_id, request, engine)
                    self.queue.change_replica(request.request_id, replica)
                    self.router.prompts.move(request.request_id, replica)
                    self.leave_if_idle(before)
                return
        self._end(request, FinishReason.UNAVAILABLE, "no WorkAgent can continue the migrated request")

    def _fail_migration(self, migrating: MigratingRequest, error: Exception) -> None:
        request_id = migrating.request.request_id
        opened = self.requests.by_id.get(request_id)
        has_no_replica = opened is None or opened.request is not migrating.request
        if opened is not None:
            self._fail(opened, error)
        if has_no_replica:
            self.replicas.accounting.tenant_slots.end_migration(request_id)
            with contextlib.suppress(Exception):  # the blocks may have caused the error
                self.replicas.reclaim_blocks(migrating.drop_blocks())

    def _end(self, request: Request, reason: FinishReason, error: str) -> None:
        opened = self.close(request.request_id)
        self.replicas.accounting.tenant_slots.end_migration(request.request_id)
        if opened is not None:
            opened.stream.put(failure_output(request, reason, error))
