"""The step loop of one replica. Only its thread may use the replica's scheduler, blocks and requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Final

from llm_serving.core.enums import PoolingMode
from llm_serving.core.fingerprint import UNKNOWN_FINGERPRINT, ComputeFingerprint
from llm_serving.core.request import FINISHED, FinishReason
from llm_serving.core.step import StepInput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.engine_requests import AttachSink, EngineRequests, Publish
from llm_serving.engine.observers import MetricsObserver, SpeculationObserver, accepted_drafts
from llm_serving.engine.recovery import Recovery
from llm_serving.engine.sinks import attach_sink, deliver, finish
from llm_serving.errors import LLMServingError, WorkerError
from llm_serving.executor.executor import Executor, StepFailedError
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.kvcache.transfer_pool import TransferPool
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.step_observer import NO_DRAFTS, CompletedStep, StepObserver, observers_by_event
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.speculation import SpeculationController
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

BuildStep = Callable[[Schedule, int], StepInput]

NEEDS_KNOWN_OUTPUT: Final = attrgetter("needs_known_output")
SHORT_STEP_S: Final = 0.02
"""Step duration in seconds up to which the next step is formed at once, so that the WorkAgent never waits."""


class Engine(EngineRequests):
    """Runs the steps of a replica: drain the inbox, propose drafts, schedule, submit, collect, update, publish.

    If the executor allows it, the next step is formed while the WorkAgent computes the current one. Observers
    (`StepObserver`) see every step. Listeners (`EngineListener`) get the events on which other parts of the server act.

    Args (`EngineRequests` explains the others):
        restart_wait_s: Maximum seconds that requests wait while the WorkAgent restarts.
        notice: Warning about the WorkAgent for the operator. It is empty if there is none.
        disk_reads: Blocks of the transfer pool that receive data from disk, or None if there is no disk cache.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        metrics: Metrics,
        publish: Publish,
        *,
        index: int = 0,
        max_steps_in_flight: int = 2,
        audit_every: int = 0,
        event_log: EventLog | None = None,
        restart_wait_s: float = 300.0,
        drafter: SpeculationController | None = None,
        clock: Clock = monotonic,
        notice: str = "",
        compute_fingerprint: ComputeFingerprint = UNKNOWN_FINGERPRINT,
        pooling: PoolingMode = PoolingMode.LAST,
        build_step: BuildStep | None = None,
        attach_sink: AttachSink = attach_sink,
        disk_reads: TransferPool | None = None,
    ) -> None:
        super().__init__(
            scheduler, executor, tokenizer, metrics, publish, index, audit_every, event_log, drafter, clock, attach_sink
        )
        self.num_steps = 0
        self.notice = notice
        self.compute_fingerprint = compute_fingerprint
        self._recovery = Recovery(
            scheduler, executor, metrics, self._on_restart_attempt, self._on_bisection_step, pooling, index
        )
        self._restart_wait_s = restart_wait_s
        self._builder = StepBuilder(scheduler.blocks, pooling)
        self._build_step: BuildStep = self._builder.build if build_step is None else build_step
        self._max_steps_in_flight = min(max_steps_in_flight, executor.max_steps_in_flight)
        self._in_flight: deque[Schedule] = deque()
        self._step_metrics = MetricsObserver(metrics, scheduler, index)
        observers: list[StepObserver] = [] if self.migration is None else [self.migration]
        observers += [self._fairness, self._reports, self._step_metrics]
        if disk_reads is not None:
            observers.append(self._use_disk_cache(disk_reads, metrics))
        if self.event_log.enabled:
            observers.append(self.event_log)
        if drafter is not None:
            runs_ahead = self._max_steps_in_flight > 1
            observers.append(SpeculationObserver(drafter, self._times, metrics, runs_ahead, self.migration))
        self._observers = observers_by_event(observers)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run steps until the engine is stopped or the WorkAgent is lost, then end all requests."""
        reason, kind = "the server is shutting down", FinishReason.UNAVAILABLE
        try:
            while not self.is_stopping:
                if not self.step():
                    self._step_metrics.record_load()
                    self._wait()
            while self._in_flight:
                self._collect()
        except LLMServingError as error:
            if not self.is_stopping:
                reason = f"the WorkAgent has exited: {error}"
                logger.error("the engine of replica %d stops: %s", self.index, reason)
        except BaseException as error:  # also a panic of a library written in Rust, which is no Exception
            reason, kind = f"internal error: {error}", FinishReason.ERROR
            logger.exception("the engine of replica %d stops", self.index)
        self._shut(reason, kind)
        self.close()

    def step(self) -> bool:
        """Submit the next step. If enough steps are in flight, collect the oldest. Return False if there is no work."""
        try:
            self.executor.await_ending()
            self._drain_inbox()
            progressed = self._advance()
        except (StepFailedError, WorkerError) as error:
            self._recover(error)
            progressed = True
        self._publish()
        return progressed

    def _advance(self) -> bool:
        if self.is_frozen:
            while self._in_flight:
                self._collect()
            return False
        if (self._auditor.waiting or self.fleet is not None) and not self.scheduler.has_unfinished_requests:
            if self.fleet is not None:
                self.fleet.apply_remote_service()
            self._auditor.run_copy()
        progressed = False
        if self._in_flight and self._waits_for_replies():
            # Published after the next step is submitted: until then the master's time delays the WorkAgent.
            self._collect()
            self._drain_inbox()
            progressed = True
        drafter = self._drafter
        if drafter is not None and (drafter.waiting or drafter.pays):
            self._propose_drafts(drafter)
        now = self._clock()
        schedule = self._schedule(now)
        if schedule is not None:
            self._submit(schedule, now)
            progressed = True
        if self._in_flight and (schedule is None or len(self._in_flight) == self._max_steps_in_flight):
            self._collect()  # the reply may let the scheduler schedule what it could not before
            progressed = True
        return progressed

    def _propose_drafts(self, drafter: SpeculationController) -> None:
        synchronous = not self._in_flight and not self._reports.admits and self._waits_for_replies()
        for request, token_ids in drafter.propose(len(self.scheduler.running), synchronous=synchronous):
            self.scheduler.set_draft_tokens(request, token_ids)

    def _schedule(self, now: float) -> Schedule | None:
        if self.fleet is not None:
            self.fleet.synchronize()
        schedule = self.scheduler.schedule(now)
        for observer in self._observers["on_scheduled"]:
            observer.on_scheduled(schedule, self._in_flight, self.scheduler.blocked, now)
        return schedule

    def _submit(self, schedule: Schedule, now: float) -> None:
        self.executor.submit(self._build_step(schedule, self.executor.next_step), self.forms_late)
        self._times.record_submitted(now, self._clock(), follows=bool(self._in_flight))
        self._in_flight.append(schedule)
        if self.executor.needs_allowed_tokens:
            self._send_allowed_tokens()
        for observer in self._observers["on_submitted"]:
            observer.on_submitted(schedule, now)
        if schedule.started:
            started = [request.root_request.request_id for request in schedule.started]
            for listener in self._listeners:
                listener.on_started(started)

    def _collect(self) -> None:
        output = self.executor.collect()
        self._times.record_reply(self._clock())
        schedule = self._in_flight.popleft()
        updated = self.scheduler.update(schedule, output.token_ids.tolist())
        if self.executor.needs_allowed_tokens:
            self._send_allowed_tokens()
        now = self._clock()
        self._times.record_updated(now)
        deliver(schedule, updated, output)
        self._processor.flush_token_gaps()
        if self.migration is not None:
            self.migration.complete_step(schedule, now)
        self.num_steps += 1
        finished = [request for request in updated if request.status is FINISHED]
        accepted = accepted_drafts(schedule, updated) if schedule.has_draft_tokens else NO_DRAFTS
        completed = CompletedStep(schedule, schedule.num_tokens, finished, accepted, self._in_flight, now)
        for observer in self._observers["on_completed"]:
            observer.on_completed(completed)
        if schedule.migrating:  # hand over before other requests of the tenant get the slots
            self._publish()
        self._times.record_published(self._clock())

    def _send_allowed_tokens(self) -> None:
        """Send the WorkAgent the tokens that constraints allow in the oldest step in flight."""
        self.executor.set_allowed_tokens(self._builder.allowed(self._in_flight[0]))

    def drop_cache(self) -> bool:
        """Drop the KV cache and requeue the running requests. If a step is in flight, do nothing and return False."""
        if self._in_flight:
            return False
        self.scheduler.reset_cache()
        self.executor.drop_cache()
        return True

    def _wait(self) -> None:
        if self._inbox.wait(self.executor.fileno(), self.idle_s):
            try:
                self.executor.collect()  # no step is in flight, so the WorkAgent has died
            except WorkerError as error:
                self._recover(error)

    # --- how far to schedule ahead ----------------------------------------------------------------------------------

    @property
    def forms_late(self) -> bool:
        """Whether the next step is formed only shortly before the current one ends, to include the latest requests."""
        return self._max_steps_in_flight > 1 and self._times.step_s > SHORT_STEP_S

    @property
    def has_steps(self) -> bool:
        return bool(self._in_flight)

    def _waits_for_replies(self) -> bool:
        """Return whether to form the next step after all replies. Earlier, it would lack drafts and some requests."""
        if self._max_steps_in_flight == 1:
            return True
        drafter, reports = self._drafter, self._reports
        if drafter is not None and drafter.pays and not reports.admits and not reports.num_tokens_left:
            return True  # the next step computes no prompt, so it can verify drafts
        running = self.scheduler.running
        num_waiting: int = sum(map(NEEDS_KNOWN_OUTPUT, running))
        step_s, host_s = self._times.step_s, self._times.host_s
        return num_waiting * (step_s + host_s) > 2 * len(running) * host_s

    # --- failures and the end ---------------------------------------------------------------------------------------

    @property
    def restarting(self) -> str | None:
        return self._recovery.restarting

    def _recover(self, error: LLMServingError) -> None:
        now = self._clock()
        lost, self._in_flight = list(self._in_flight), deque()
        for observer in self._observers["on_failed"]:
            observer.on_failed(now)
        culprits = self._recovery.culprits(error, lost)
        if self.migration is not None:
            self.migration.release_imports()
        self.event_log.recovered(self._clock())
        for request in culprits:
            finish(request, FinishReason.ERROR, str(error))

    def _on_restart_attempt(self, reason: str) -> None:
        """Handle the inbox's messages. End all requests if the WorkAgent was lost more than `restart_wait_s` ago."""
        self._drain_inbox()
        status = self.executor.restart_status
        if status is not None and self._clock() - status.lost_at > self._restart_wait_s:
            error = f"the WorkAgent of the request was not restarted within {self._restart_wait_s:g} s: {reason}"
            self.end_all(error, FinishReason.UNAVAILABLE)
        self._publish()
        for listener in self._listeners:
            listener.on_restart_attempt()

    def _on_bisection_step(self) -> None:
        self._drain_inbox()
        self._publish()

    def _shut(self, reason: str, kind: FinishReason) -> None:
        self._inbox.end(reason)
        self._inbox.handle()
        self.end_all(reason, kind)
        if self.migration is not None:
            self.migration.close()
        self._publish()
        self._step_metrics.record_load()
