"""Listeners to events of an engine, and observers of its steps: step times, metrics, fairness, TTFT, speculation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_serving.admission.ttft_predictor import InFlightSteps, TtftPredictor
from llm_serving.core.request import Request
from llm_serving.engine import audit
from llm_serving.engine.fleet.monitors import LimitMonitor, StepShare, WeightMonitor
from llm_serving.engine.fleet.sharing import ClassLead
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.observability.metrics import Metrics, SwapLoad
from llm_serving.observability.step_observer import CompletedStep, StepObserver
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.schedule import FULL, NO_ROOM, Blocked
from llm_serving.speculation import SpeculationController

if TYPE_CHECKING:
    from llm_serving.engine.fleet.migration import MigratingRequest, RequestMigration

STEP_MEMORY: Final = 128


class EngineListener:
    """Base class of listeners. Its methods do nothing. Unless stated otherwise, the engine's thread calls them."""

    def on_started(self, request_ids: list[str]) -> None:
        """Called after the first step of these requests was submitted, and before their first output."""

    def on_restart_attempt(self) -> None: ...

    def on_closing(self) -> None:
        """Called in any thread when the engine accepts no further requests."""

    def on_woken(self) -> None:
        """Called in any thread when another replica has changed data that the engine reads before its next step."""

    def on_migrating(self, requests: list[MigratingRequest]) -> None:
        """Called with requests that other replicas must continue. This engine has published all their outputs."""

    def on_blocks_released(self, blocks: list[TransferBlock]) -> None:
        """Called with transfer pool blocks that this engine has read. The replicas that wrote them may reuse them."""


class StepTimes:
    """Durations of steps and of the master's work, in seconds. The `record_` methods are called in their order here."""

    def __init__(self) -> None:
        self.began = 0.0
        self.step_s = 0.0
        """Seconds of the latest step, from the time at which the WorkAgent could begin it."""
        self.mean_s: float | None = None
        self.period_s = 0.0
        self.computed_s = 0.0
        """Seconds from the previous reply, or from the submission if no step was in flight, to the latest reply."""
        self.host_s = 0.0
        """Seconds of the master's work for a step: to process a reply and to form the next step."""
        self._reply_s = self._updated = 0.0
        self._replied = 0.0
        """Time of the latest reply, or of the latest submission without a step in flight."""

    def record_submitted(self, scheduled: float, now: float, *, follows: bool) -> None:
        """Record a step whose scheduling began at `scheduled`. `follows` is true if another step was in flight."""
        self.host_s = self._reply_s + now - scheduled
        if not follows:
            self.began, self._replied = scheduled, now

    def record_reply(self, now: float) -> None:
        self.computed_s, self._replied = now - self._replied, now

    def record_updated(self, now: float) -> None:
        """Record that the scheduler has applied the reply. This is when the WorkAgent can begin the next step."""
        self.step_s, self.began = now - self.began, now
        self.period_s, self._updated = now - self._updated, now
        mean_s = self.step_s if self.mean_s is None else self.mean_s
        self.mean_s = mean_s + (self.step_s - mean_s) / STEP_MEMORY

    def record_published(self, now: float) -> None:
        self._reply_s = now - self._replied


class MetricsObserver(StepObserver):
    def __init__(self, metrics: Metrics, scheduler: Scheduler, index: int) -> None:
        self._metrics, self._scheduler, self._index = metrics, scheduler, index
        metrics.swap_loads[index] = self._swap_load

    def on_completed(self, step: CompletedStep) -> None:
        metrics, schedule = self._metrics, step.schedule
        self.record_load(step.num_tokens)
        if schedule.preempted:
            metrics.record_preempted([request.priority for request in schedule.preempted])
        if schedule.block_moves or schedule.preemptions:
            metrics.record_swaps(schedule.block_moves, schedule.preemptions)
        if schedule.num_bound_violations:
            metrics.record_bound_violations(schedule.num_bound_violations)

    def record_load(self, num_tokens: int | None = None) -> None:
        scheduler, pool = self._scheduler, self._scheduler.blocks.pool
        load = len(scheduler.running), scheduler.num_waiting, pool.num_used_blocks / pool.num_blocks
        self._metrics.record_load(*load, num_tokens, replica=self._index)

    def _swap_load(self) -> SwapLoad:
        blocks = self._scheduler.blocks
        return SwapLoad(blocks.num_swapped_requests, blocks.host_pool.num_used_blocks, blocks.host_pool.num_blocks)


class FairnessObserver(StepObserver):
    def __init__(self, index: int, scheduler: Scheduler, metrics: Metrics) -> None:
        self._index, self._scheduler, self._metrics = index, scheduler, metrics
        self._limits, self._weights = LimitMonitor(), WeightMonitor(scheduler)
        self._leads: Mapping[str, ClassLead] = {}
        self._shares: Mapping[str, StepShare] | None = None

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        if schedule is None:
            return
        limits, num_over_limit, num_against_weight = self._scheduler.limits, 0, 0
        if limits.max_running_per_tenant is not None or limits.max_running_of_tenant:
            num_over_limit = self._limits.record_started(schedule.started, limits)
        if len(self._scheduler.waiting.sharing.contenders) > 1 or self._weights.excess:
            num_against_weight = self._weights.count_violations(schedule, self._leads, self._shares)
        if num_over_limit or num_against_weight:
            self._metrics.shares_broken(num_over_limit, num_against_weight)

    def record_reload(self, number: int) -> None:
        self._limits.record_reload(self._index, self._scheduler.unstarted_slot_holders(), number)


class LoadReports(StepObserver):
    """Passes the steps and the load of an engine to the TTFT predictor. Other threads only read `predictor`."""

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self.predictor = TtftPredictor(scheduler.limits)
        self.num_tokens_left = 0
        """Number of prompt tokens that remain of the prompts which the latest step computed in part."""
        self._num_running = 0
        """Number of running requests after the latest call of `Scheduler.schedule`."""
        self._scheduler = scheduler
        self._times = times

    @property
    def admits(self) -> bool:
        """Whether a waiting request may start in the next step, which then verifies no drafts."""
        scheduler = self._scheduler
        if not len(scheduler.waiting):
            return False
        blocked = scheduler.blocked
        if blocked is None or blocked.reason in NO_ROOM:
            return True
        if blocked.reason not in FULL or len(scheduler.running) == self._num_running:
            return False
        request = scheduler.find(blocked.request_id)
        return request is None or scheduler.slots.has_room_for(request, scheduler.prefill.parent_of(request))

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        if schedule is not None:  # requests that arrive later cannot join this step
            self.num_tokens_left = 0
            if schedule.num_tokens != schedule.num_samples:  # the step computes prompts too
                for row in schedule.rows:
                    if not row.num_samples:
                        self.num_tokens_left += row.request.num_tokens - row.end
            self._report_in_flight([*in_flight, schedule], self._times.began if in_flight else now)
        # There is room if no request waits, and a request of mean size fits beside one block for each running request.
        pool = self._scheduler.blocks.pool
        num_running = self._num_running = len(self._scheduler.running)
        num_free = pool.num_free_blocks - num_running
        has_room = not len(self._scheduler.waiting) and num_free * num_running >= pool.num_used_blocks
        self.predictor.record_running(num_running, blocked, has_room)

    def on_completed(self, step: CompletedStep) -> None:
        self._report_in_flight(step.in_flight, step.now)
        if step.finished:
            self.predictor.record_running(len(self._scheduler.running))
        self.predictor.record_step(
            num_tokens=step.num_tokens,
            num_rows=len(step.schedule.rows),
            seconds=self._times.step_s,
            num_finished=len(step.finished),
        )

    def on_failed(self, now: float) -> None:
        self.num_tokens_left = 0
        self._report_in_flight((), self._times.began)

    def _report_in_flight(self, steps: Collection[Schedule], began: float) -> None:
        num_tokens = 0
        for each in steps:
            num_tokens += each.num_tokens - len(each.rows)
        self.predictor.in_flight = InFlightSteps(len(steps), num_tokens, self.num_tokens_left, began)


@dataclass(eq=False, slots=True)
class SpeculationObserver(StepObserver):
    _drafter: SpeculationController
    _times: StepTimes
    _metrics: Metrics
    _runs_ahead: bool
    _migration: RequestMigration | None
    _continues: bool = field(default=False, init=False)
    """Whether unfinished requests remained after the previous step, so that the engine was never idle since."""

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        self._drafter.has_queue = blocked is not None and blocked.reason in FULL
        if schedule is None:
            return
        for request in schedule.started:
            if request.tenant != audit.TENANT:  # audits also compare answers with and without drafts
                self._drafter.add_request(request)
        if self._migration is not None and (accepted := self._migration.accepted):
            for row in schedule.rows:
                if row.request in accepted:
                    self._drafter.add_request(row.request)

    def on_completed(self, step: CompletedStep) -> None:
        drafter, schedule = self._drafter, step.schedule
        if step.num_tokens == schedule.num_samples:  # no prompt was computed
            host_s = self._times.host_s if self._runs_ahead else 0.0
            drafter.gain.record_step(step.num_tokens, self._times.computed_s, host_s)
        num_rows, num_tokens, factor = len(schedule.rows), step.num_tokens, 1.0
        if schedule.has_draft_tokens:  # each row computes one token and its drafts
            num_tokens, factor = num_rows, 1.0 + sum(step.accepted.values()) / num_rows
        seconds = self._times.period_s if self._continues else self._times.step_s
        has_prompts = step.num_tokens > schedule.num_samples
        drafter.measured.add(num_tokens, factor, seconds, has_prompts=has_prompts, pays=drafter.pays)
        self._continues = len(step.finished) < num_rows
        if schedule.has_draft_tokens:
            for row in schedule.rows:
                if row.num_drafts:
                    num_accepted = step.accepted.get(row.request.sequence, 0)
                    counts = drafter.record_verified(row.request, row.num_drafts, num_accepted)
                    self._metrics.record_verified_drafts(counts)
        drafter.record_step(step.finished, num_rows)


def accepted_drafts(schedule: Schedule, updated: list[Request]) -> Mapping[int, int]:
    live = set(updated)
    return {
        row.request.sequence: row.request.num_new_tokens - 1
        for row in schedule.rows
        if row.num_drafts and row.request in live
    }
