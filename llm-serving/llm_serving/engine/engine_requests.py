"""The requests of one engine and what is asked about them; everything here belongs to the engine's thread."""

from __future__ import annotations

from collections.abc import Callable

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock
from llm_serving.engine.audit import Auditor
from llm_serving.engine.deadlines import Deadlines
from llm_serving.engine.delivery import end
from llm_serving.engine.fleet.accounting import FleetSync
from llm_serving.engine.fleet.migration import MigratingRequest, RequestMigration
from llm_serving.engine.load_reports import LoadReports, StepTimes
from llm_serving.engine.observers import FairnessObserver
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.engine.sinks import SinkContext, receive
from llm_serving.engine.thread_safe_calls import ThreadSafeCalls
from llm_serving.executor.executor import Executor
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.snapshot import EngineSnapshot, SchedulerState, scheduler_state, take_snapshot
from llm_serving.scheduler import Scheduler
from llm_serving.scheduler.bounds import longest_waits
from llm_serving.scheduler.components import SchedulingRules
from llm_serving.speculation import SpeculationController
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

AttachSink = Callable[[Request, SinkContext], object]


class EngineRequests(ThreadSafeCalls):
    """Adds, finds, changes and ends the requests of one engine.

    Args:
        scheduler: Schedules them.
        executor: Runs their steps.
        tokenizer: Turns their output into text.
        metrics: Of the server.
        index: Of the replica.
        audit_every: One of so many requests is computed again and compared; 0: none.
        journal: Event log of requests and steps; None: one that keeps nothing.
        drafter: Proposes draft tokens; None: no speculation.
        clock: Of all times.
        attach_sink: Gives a request the sink of its output and queues what is to be computed first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        metrics: Metrics,
        index: int,
        audit_every: int,
        journal: EventLog | None,
        drafter: SpeculationController | None,
        clock: Clock,
        attach_sink: AttachSink = receive,
    ) -> None:
        super().__init__(scheduler, executor, EventLog() if journal is None else journal)
        self.index = index
        self._clock = clock
        self._drafter = drafter
        self._attach_sink = attach_sink
        self._times = StepTimes()
        self._reports = LoadReports(scheduler, self._times)
        self.ttft_predictor = self._reports.predictor
        """Read by admission control, from any thread."""
        self.fleet = FleetSync(index, scheduler, metrics) if scheduler.limits.num_schedulers > 1 else None
        """Accounting across replicas; None: this is the only one."""
        self._fairness = self.fleet or FairnessObserver(index, scheduler, metrics)
        self._deadlines = Deadlines()
        self._outputs: list[RequestOutput] = []
        self._processor = OutputProcessor(tokenizer, metrics, self.journal, clock)
        self._desk = SinkContext(scheduler, self._processor, self._outputs.append)
        self._auditor = Auditor(audit_every, scheduler, tokenizer, metrics, clock)
        self.migration: RequestMigration | None = None
        """None: no request migrates."""
        if scheduler.blocks.transfer_pool.pool.num_blocks:
            self.migration = RequestMigration(
                scheduler, self._processor, self._auditor, self._desk, self.journal, metrics, self._listeners
            )

    def reprioritise(self, request_id: str, priority: int) -> bool:
        """Give a request another priority; return whether it has it now. A finished request keeps its own."""
        request = self._processor.find(request_id)
        if request is None or request.sink is None or not request.sink.set_priority(priority):
            return False
        self.journal.moved(request, class_of(priority, self.scheduler.classes))
        return True

    def audits(self, request: Request) -> bool:
        """Return whether the output of the request is computed again and compared."""
        return self._auditor.watches(request.request_id)

    def put_off(self, request_id: str, deadline: float | None) -> None:
        """Give a request a later deadline, or none."""
        request = self._processor.find(request_id)
        if request is None or request.sink is None:
            return
        request.deadline = deadline
        for each in request.sink.active_requests:
            self.scheduler.set_deadline(each, deadline)
        self._deadlines.add(request)

    def reload(self, rules: SchedulingRules, number: int) -> None:
        """Schedule by other rules, which are the server's reload with this number (from 1)."""
        self.scheduler.reload(rules)
        self._fairness.record_reload(number)
        self.ttft_predictor.limits = rules.limits
        self.log_bounds()

    def log_bounds(self) -> None:
        logger.info("replica %d: %s", self.index, longest_waits(self.scheduler.bounds))
        limits = self.scheduler.limits
        if limits.num_schedulers > 1:
            logger.info(
                "replica %d: limits of tenants and weights of classes hold for all %d replicas together; a class is"
                " sure of 1/%d of its weight here",
                self.index,
                limits.num_schedulers,
                limits.weight_divisor,
            )

    def state(self) -> SchedulerState:
        return scheduler_state(self.scheduler, self._clock(), self._times.mean_s)

    def take_snapshot(self, since: float) -> EngineSnapshot:
        """Return the same, with the events since a time."""
        return take_snapshot(self.scheduler, self.journal, self._clock(), self.mean_step_s, since)

    @property
    def mean_step_s(self) -> float | None:
        """Moving average of the seconds per step; None before the first. From any thread."""
        return self._times.mean_s

    # --- messages of other threads ----------------------------------------------------------------------------------

    def _add(self, request: Request) -> None:
        self._auditor.started(request)
        self._expect(request)
        self._attach_sink(request, self._desk)
        self.journal.queued(request, self._clock())

    def _arrive(self, migrating: MigratingRequest, is_cancelled: bool) -> None:
        assert self.migration is not None
        if self.fleet is not None:
            self.fleet.record_migrated(migrating.request)
        self._expect(migrating.request)
        self.migration.accept(migrating)
        self.journal.queued(migrating.request, self._clock())
        if is_cancelled:
            end(migrating.request, FinishReason.ABORT)

    def _abort(self, request_id: str) -> None:
        request = self._processor.find(request_id)
        if request is not None:
            end(request, FinishReason.ABORT)

    def _expect(self, request: Request) -> None:
        if self._drafter is not None:
            self._drafter.add_request(request)
        self._deadlines.add(request)

    def _end_all(self, reason: str, kind: FinishReason) -> None:
        self._auditor.drop()
        for request in self._processor.unfinished():
            end(request, kind, reason)
