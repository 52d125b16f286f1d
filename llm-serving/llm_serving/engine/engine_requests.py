"""The requests of one engine: its inbox, calls from other threads, and operations in the engine's thread."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock
from llm_serving.engine.audit import Auditor
from llm_serving.engine.deadlines import Deadlines
from llm_serving.engine.disk_cache import DiskCache
from llm_serving.engine.fleet.accounting import FleetSync
from llm_serving.engine.fleet.migration import MigratingRequest, RequestMigration
from llm_serving.engine.observers import EngineListener, FairnessObserver, LoadReports, StepTimes
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.engine.sinks import SinkContext, attach_sink, finish
from llm_serving.errors import WorkerDiedError
from llm_serving.executor.executor import Executor
from llm_serving.kvcache.transfer_pool import TransferBlock, TransferPool
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.snapshot import EngineSnapshot, SchedulerState, scheduler_state, take_snapshot
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler.bounds import longest_waits
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.speculation import SpeculationController
from llm_serving.text.tokenizer.tokenizer import Tokenizer


class Inbox:
    """Functions that the engine's thread calls in order between two steps. Any thread may post one."""

    def __init__(self) -> None:
        self.messages: deque[Callable[[], None]] = deque()
        self.ended: str | None = None
        self.on_end: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def post(self, message: Callable[[], None]) -> None:
        """Add a function, and wake the engine's thread. Raise WorkerDiedError if the inbox has ended."""
        with self._lock:
            if self.ended is not None:
                raise WorkerDiedError(self.ended)
            self.messages.append(message)
            os.eventfd_write(self._wake_fd, 1)

    def wake(self) -> None:
        """End the current call of `wait`. If there is none, end the next call at once."""
        with self._lock:
            if self.ended is None:  # after the end, the descriptor may belong to another file
                os.eventfd_write(self._wake_fd, 1)

    def handle(self) -> None:
        while self.messages:
            self.messages.popleft()()

    def wait(self, other_fd: int | None, timeout_s: float | None) -> bool:
        """Sleep until `wake`, data on `other_fd` or the timeout. Return True if only data on `other_fd` woke it."""
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if other_fd is not None:
            poll.register(other_fd, select.POLLIN)
        ready = dict(poll.poll(None if timeout_s is None else math.ceil(1000 * timeout_s)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
            return False
        return other_fd in ready

    def end(self, reason: str) -> None:
        """Accept no more calls. `handle` still makes the calls that were posted before."""
        with self._lock:
            self.ended = self.ended or reason
        self.on_end()

    def close(self, reason: str) -> None:
        self.end(reason)
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            os.close(wake_fd)


T = TypeVar("T")

logger = get_logger(__name__)

Publish = Callable[[list[RequestOutput]], None]
AttachSink = Callable[[Request, SinkContext], None]


class EngineRequests:
    """The part of an engine that adds, changes and ends requests.

    Any thread may call `submit` and the methods after it up to `close`. They post messages, which the engine's thread
    handles between two steps. Only that thread may call `set_priority` and the methods after it. `audit_every`: one of
    this many requests is audited; 0 means none. `attach_sink(request, context)` creates the object that receives the
    outputs of a client's request.
    """

    disk_cache: DiskCache | None = None
    is_frozen = False
    """While True, no step is scheduled. Requests keep their state, but their deadlines apply."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        metrics: Metrics,
        publish: Publish,
        index: int,
        audit_every: int,
        event_log: EventLog | None,
        drafter: SpeculationController | None,
        clock: Clock,
        attach_sink: AttachSink = attach_sink,
    ) -> None:
        self.scheduler = scheduler
        self.index = index
        self.event_log = EventLog() if event_log is None else event_log
        self.executor = executor
        self._clock = clock
        self._drafter = drafter
        self._attach_sink = attach_sink
        self._inbox = Inbox()
        self._inbox.on_end = self._report_closing
        self._listeners: list[EngineListener] = []
        self.is_stopping = False
        self._num_added = 0
        self._times = StepTimes()
        self._reports = LoadReports(scheduler, self._times)
        self.ttft_predictor = self._reports.predictor
        """Predicts the TTFT of new requests. Admission control reads it from other threads."""
        self.fleet = FleetSync(index, scheduler, metrics) if scheduler.limits.num_schedulers > 1 else None
        self._fairness = self.fleet or FairnessObserver(index, scheduler, metrics)
        self._deadlines = Deadlines(scheduler)
        self._publish_outputs = publish
        self._outputs: list[RequestOutput] = []
        self._processor = OutputProcessor(tokenizer, metrics, self.event_log, clock)
        self._sink_context = SinkContext(scheduler, self._processor, self._outputs.append)
        self._auditor = Auditor(audit_every, scheduler, tokenizer, metrics, clock)
        self.migration: RequestMigration | None = None
        if scheduler.blocks.transfer_pool.pool.num_blocks:
            self.migration = RequestMigration(
                scheduler, self._processor, self._auditor, self._sink_context, self.event_log, metrics, self._listeners
            )

    # --- from any thread --------------------------------------------------------------------------------------------

    def add_listener(self, listener: EngineListener) -> None:
        self._listeners.append(listener)

    def submit(self, request: Request) -> None:
        """Queue a request that passed admission control. Raise WorkerDiedError if the engine ends or has ended."""
        if self.is_stopping:
            raise WorkerDiedError("the engine is shutting down")
        self.event_log.submitted(request, class_of(request.priority, self.scheduler.classes))
        try:
            self._inbox.post(partial(self._add, request))
        except WorkerDiedError:
            self.event_log.forget(request)
            raise

    def set_adapter(self, number: int, folder: str) -> None:
        """Load an adapter, or unload it if `folder` is empty. Raise WorkerDiedError if the engine has ended."""

        def change() -> None:
            if not folder:
                self._auditor.forget_adapter(number)
            self.executor.set_adapter(number, folder)

        self._inbox.post(change)

    def abort(self, request_id: str) -> None:
        """End a request before the next step. Do nothing if it has finished."""

        def end() -> None:
            request = self._processor.find(request_id)
            if request is not None:
                finish(request, FinishReason.ABORT)

        with contextlib.suppress(WorkerDiedError):  # then all requests of the engine have ended
            self._inbox.post(end)

    def take_over(self, migrating: MigratingRequest, *, is_cancelled: bool = False) -> None:
        """Continue a migrated request, or end it if it was cancelled. Raise the errors of `submit`."""
        if self.is_stopping:
            raise WorkerDiedError("the engine is shutting down")
        self._inbox.post(lambda: self._arrive(migrating, is_cancelled))

    def reclaim_blocks(self, blocks: list[TransferBlock]) -> None:
        with contextlib.suppress(WorkerDiedError):  # the next engine starts with an empty transfer pool
            self._inbox.post(lambda: self.scheduler.reclaim_exported_blocks(blocks))

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Call a function in the engine's thread; return a future. Raise WorkerDiedError if the engine has ended."""
        answer: Future[T] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # noqa: BLE001  raised to the caller
                    answer.set_exception(error)

        self._inbox.post(reply)
        return answer

    def wake(self) -> None:
        """Wake the engine's thread to apply changes by other replicas, for example of a tenant's number of slots."""
        with contextlib.suppress(WorkerDiedError):
            self._inbox.post(lambda: None)
        for listener in self._listeners:
            listener.on_woken()

    def stop(self) -> None:
        """End the loop after the steps in flight. Unfinished requests end with an error."""
        self.is_stopping = True
        self._report_closing()
        self._inbox.wake()
        self.executor.cancel_restarts()

    def replace_inbox(self, inbox: Inbox) -> None:
        self._inbox.close("another inbox replaces this one")
        self._inbox, inbox.on_end = inbox, self._report_closing

    def close(self) -> None:
        """Close the inbox's file descriptor, and end the thread of the disk cache. No step may run after this."""
        self._inbox.close("the engine is closed")
        if self.disk_cache is not None:
            self.disk_cache.close()

    @property
    def dead(self) -> str | None:
        return self._inbox.ended

    @property
    def num_waiting(self) -> int:
        num_waiting = self.scheduler.num_waiting + len(self._inbox.messages)
        return num_waiting if self.disk_cache is None else num_waiting + self.disk_cache.num_waiting

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests or self.num_waiting > 0

    @property
    def mean_step_s(self) -> float | None:
        return self._times.mean_s

    def _report_closing(self) -> None:
        for listener in self._listeners:
            listener.on_closing()

    # --- in the engine's thread -------------------------------------------------------------------------------------

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Change a request's priority. Return False if it keeps its old one, for example because it has finished."""
        request = self._processor.find(request_id)
        if request is None or request.sink is None or not request.sink.set_priority(priority):
            return False
        self.event_log.class_changed(request, class_of(priority, self.scheduler.classes))
        return True

    def extend_deadline(self, request_id: str, deadline: float | None) -> None:
        request = self._processor.find(request_id)
        if request is None or request.sink is None:
            return
        request.deadline = deadline
        for each in request.sink.active_requests:
            self.scheduler.set_deadline(each, deadline)
        if deadline is not None:
            self._deadlines.add(request)

    def audits(self, request: Request) -> bool:
        return request.request_id in self._auditor.watched

    def reload(self, rules: SchedulingRules, number: int) -> None:
        """Apply new scheduling rules from now on. `number` counts the server's reloads of its configuration, from 1."""
        self.scheduler.reload(rules)
        self._fairness.record_reload(number)
        self.ttft_predictor.limits = rules.limits
        self.log_bounds()

    def log_bounds(self) -> None:
        logger.info("replica %d: %s", self.index, longest_waits(self.scheduler.bounds))
        limits = self.scheduler.limits
        if limits.num_schedulers > 1:
            logger.info(
                "replica %d: tenant limits and class weights apply to all %d replicas together; this replica guarantees"
                " each class 1/%d of its weight",
                self.index,
                limits.num_schedulers,
                limits.weight_divisor,
            )

    def state(self) -> SchedulerState:
        return scheduler_state(self.scheduler, self._clock(), self._times.mean_s)

    def take_snapshot(self, since: float) -> EngineSnapshot:
        return take_snapshot(self.scheduler, self.event_log, self._clock(), self.mean_step_s, since)

    @property
    def idle_s(self) -> float | None:
        """Maximum seconds for which the engine may sleep, or None if only a message can bring work."""
        now = self._clock()
        has_batch = len(self.scheduler.waiting) > 0 and not self.is_frozen
        timeouts_s = [self.scheduler.prefill.batch_wait_s(now)] if has_batch else []
        if self._deadlines.heap and (deadline := self._deadlines.next) is not None:
            timeouts_s.append(max(0.0, deadline - now))
        return min(timeouts_s, default=None)

    def _use_disk_cache(self, reads: TransferPool, metrics: Metrics) -> DiskCache:
        self.disk_cache = DiskCache(
            self.scheduler,
            self.executor,
            reads,
            metrics,
            lambda message: self._inbox.post(message),
            lambda request: self.event_log.queued(request, self._clock()),
        )
        self._attach_sink = self.disk_cache.attach_sink
        return self.disk_cache

    def _drain_inbox(self) -> None:
        if self._inbox.messages:
            if self.fleet is not None:
                self.fleet.apply_remote_service()
            self._inbox.handle()
        if self._deadlines.heap:
            now = self._clock()
            self._inbox.handle()  # deadlines that were extended before `now`
            self._deadlines.end_expired(now, self.ttft_predictor, self._times.began)

    def _publish(self) -> None:
        if self._outputs:
            outputs = self._outputs.copy()
            self._outputs.clear()
            if self._auditor.watched:
                self._auditor.record(outputs)
            self._publish_outputs(outputs)
        if self.migration is not None:
            self.migration.hand_over()

    def _add(self, request: Request) -> None:
        self._num_added += 1
        if (every := self._auditor.every) and self._num_added % every == 0:
            self._auditor.start(request)
        if request.deadline is not None:
            self._deadlines.add(request)
        self._attach_sink(request, self._sink_context)
        self.event_log.queued(request, self._clock())

    def _arrive(self, migrating: MigratingRequest, is_cancelled: bool) -> None:
        assert self.migration is not None
        if self.fleet is not None:
            self.fleet.record_migrated(migrating.request)
        if migrating.request.deadline is not None:
            self._deadlines.add(migrating.request)
        self.migration.accept(migrating)
        self.event_log.queued(migrating.request, self._clock())
        if is_cancelled:
            finish(migrating.request, FinishReason.ABORT)

    def end_all(self, reason: str, kind: FinishReason) -> None:
        self._auditor.cancel_copy()
        for request in self._processor.unfinished():
            finish(request, kind, reason)
