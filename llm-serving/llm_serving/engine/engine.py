"""The loop of one replica: sole owner of its scheduler, blocks and requests."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Final, TypeVar

from llm_serving.core.fingerprint import NOT_KNOWN
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.step import StepInput
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.audit import Auditor
from llm_serving.engine.deadlines import Deadlines, Overdue
from llm_serving.engine.delivery import deliver, end
from llm_serving.engine.fleet.accounting import Peers
from llm_serving.engine.fleet.migration import Departure, Moves
from llm_serving.engine.inbox import Inbox
from llm_serving.engine.load_reports import LoadReports, StepTimes
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.engine.recovery import Recovery
from llm_serving.engine.sinks import Desk, receive
from llm_serving.errors import LLMServingError, WorkerDiedError, WorkerError
from llm_serving.executor.cluster.block_link import BlockLink
from llm_serving.executor.executor import Executor, StepFailedError
from llm_serving.executor.restart_status import Away
from llm_serving.executor.step_builder import StepBuilder
from llm_serving.kvcache.transfer_pool import TransferBlock
from llm_serving.log import get_logger
from llm_serving.observability.event_log import NO_DRAFTS, Journal
from llm_serving.observability.metrics import Metrics
from llm_serving.observability.snapshot import Glance, SchedulerState, glance, scheduler_state
from llm_serving.observability.transfer_metrics import SwapLoad
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.bounds import longest_waits
from llm_serving.scheduler.components import Rules
from llm_serving.scheduler.schedule import NO_ROOM
from llm_serving.speculation import SpeculationController
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

Publish = Callable[[list[RequestOutput]], None]

T = TypeVar("T")

SHORT_STEP_S: Final = 0.02
"""Beside a step as short as this, neither waking to form the next one late nor what that may delay is small."""


class Engine:
    """Schedules, submits, collects, publishes; one step ahead of the WorkAgent where the executor allows it.

    Everything but `submit`, `abort`, `ask`, `stop` and the counts belongs to the thread that calls `run` (or `step`).
    Those put a message into the inbox and may be called from any thread.
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
        journal: Journal | None = None,
        restart_wait_s: float = 300.0,
        drafter: SpeculationController | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.num_steps = 0
        """Steps whose results have come."""
        self.notice = ""
        """What the operator should know of its WorkAgent; usually empty."""
        self.computed_by = NOT_KNOWN
        """By what its WorkAgent computes."""
        self.machine: Callable[[], str] = lambda: ""
        """Tells where its WorkAgent runs: the address, or nothing for the master's own machine."""
        self.block_link: Callable[[], BlockLink | None] = lambda: None
        """The way to its WorkAgent's part in moves; None: it shares memory with others."""
        self._times = StepTimes()
        self._reports = LoadReports(scheduler, self._times)
        self.ttft_predictor = self._reports.predictor
        """What the door reads; from any thread."""
        self.journal = Journal() if journal is None else journal
        """What happened to its requests and steps, for those who ask; keeps nothing unless told to."""
        self.on_started: Callable[[list[str]], None] = lambda request_ids: None
        """Told of requests when a step is formed with them for the first time, before anything of it is published."""
        self.on_away: Callable[[], None] = lambda: None
        """Told in the engine's thread that another attempt to start its WorkAgent again has been made."""
        self.on_closing: Callable[[], None] = lambda: None
        """Told, by any thread, when it is to take no requests any more: it has ended, or is about to."""
        self.peers = Peers(index, scheduler, metrics)
        self.nudge: Callable[[], None] = self._post_nothing
        """Has it look again at what it shares with them; may be called from any thread."""
        self._executor = executor
        self._recovery = Recovery(scheduler, executor, metrics, self._while_away, self._while_tried)
        self._restart_wait_s = restart_wait_s
        self._drafter = drafter
        self._builder = StepBuilder(scheduler.blocks)
        self.build_step: Callable[[Schedule, int], StepInput] = self._builder.build
        """Makes what the executor gets of what was decided; simulations need less of it."""
        self.receive: Callable[[Request, Desk], object] = receive
        """Gives a request who answers it; simulations count tokens only."""
        self._processor = OutputProcessor(tokenizer, metrics, self.journal, clock)
        self._desk = Desk(scheduler, self._processor, self._tell)
        self._auditor = Auditor(audit_every, scheduler, tokenizer, metrics, clock)
        self.moves = Moves(scheduler, self._processor, self._auditor, self._desk, self.journal, metrics)
        """Tells of what goes on at other replicas."""
        self.index = index
        """Of its replica."""
        self._metrics = metrics
        self._publish = publish
        self._clock = clock
        self._max_steps_in_flight = min(max_steps_in_flight, executor.max_steps_in_flight)
        self._deadlines = Deadlines()
        self._overdue = Overdue(self._deadlines, scheduler)
        self._in_flight: deque[Schedule] = deque()
        """Steps that have been submitted and not been replied to, the oldest first."""
        self._inbox = Inbox()
        self._inbox.on_end = lambda: self.on_closing()
        self._outputs: list[RequestOutput] = []
        self._stopping = False
        metrics.swaps.watch(index, self._swap_load)

    # --- from any thread --------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request that passed the checks at the door.

        Raises:
            WorkerDiedError: The engine has ended, or has been told to.
        """
        if self._stopping:
            raise WorkerDiedError("the engine is about to end")
        self.journal.submitted(request, class_of(request.priority, self.scheduler.classes))
        try:
            self._inbox.post(lambda: self._add(request))
        except WorkerDiedError:
            self.journal.forget(request)
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step; one that has ended already is left alone."""
        with contextlib.suppress(WorkerDiedError):  # then it has ended with everything else
            self._inbox.post(lambda: self._abort(request_id))

    def take_over(self, departure: Departure, *, is_cancelled: bool = False) -> None:
        """Goes on with a request that another replica has begun; one that was cancelled on its way ends here.

        Raises:
            WorkerDiedError: The engine has ended, or has been told to.
        """
        if self._stopping:
            raise WorkerDiedError("the engine is about to end")
        self._inbox.post(lambda: self._arrive(departure, is_cancelled))

    def give_back(self, blocks: list[TransferBlock]) -> None:
        """Others need these of its blocks no longer."""
        with contextlib.suppress(WorkerDiedError):  # whoever has its part of the memory next knows nothing of them
            self._inbox.post(lambda: self.scheduler.give_back(blocks))

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Has the engine's thread answer a question between two steps, where nothing changes meanwhile.

        Raises:
            WorkerDiedError: The engine has ended.
        """
        answer: Future[T] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # noqa: BLE001  whoever asked is told
                    answer.set_exception(error)

        self._inbox.post(reply)
        return answer

    def reprioritise(self, request_id: str, priority: int) -> bool:
        """Whether a request has this priority now; one that has ended has not. To be called by the engine's thread."""
        request = self._processor.find(request_id)
        if request is None or request.receiver is None or not request.receiver.reprioritise(priority):
            return False
        self.journal.moved(request, class_of(priority, self.scheduler.classes))
        return True

    def audits(self, request: Request) -> bool:
        """Whether what the request's client is told is compared. To be called by the engine's thread."""
        return self._auditor.watches(request.request_id)

    def put_off(self, request_id: str, deadline: float | None) -> None:
        """Gives a request until a later deadline, or for ever with None. To be called by the engine's thread."""
        request = self._processor.find(request_id)
        if request is None or request.receiver is None:
            return
        request.deadline = deadline
        for each in request.receiver.computed:
            self.scheduler.put_off(each, deadline)
        self._deadlines.add(request)

    def reload(self, rules: Rules, number: int) -> None:
        """Goes on by other rules, the server's first, second, .. others. To be called by the engine's thread."""
        self.scheduler.reload(rules)
        self.peers.reloaded(number)
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
                limits.least_part,
            )

    def state(self) -> SchedulerState:
        """To be called by the engine's thread."""
        return scheduler_state(self.scheduler, self._clock(), self._times.mean_s)

    def glance(self, since: float) -> Glance:
        """The same, with what has happened since a time. To be called by the engine's thread."""
        return glance(self.scheduler, self.journal, self._clock(), self.mean_step_s, since)

    def stop(self) -> None:
        """Ends the loop after the steps in flight; unfinished requests end with an error."""
        self._stopping = True
        self.on_closing()
        self._inbox.wake()
        self._executor.give_up()

    def replace_inbox(self, inbox: Inbox) -> None:
        """Messages come by another one, before any has come by the first."""
        self._inbox.close("another takes its place")
        self._inbox, inbox.on_end = inbox, lambda: self.on_closing()

    def close(self) -> None:
        """Gives back the descriptor it is woken by, as `run` does in the end: it is not stepped any more."""
        self._inbox.close("the engine is closed")

    @property
    def dead(self) -> str | None:
        """Why the engine ended, once it has."""
        return self._inbox.ended

    @property
    def is_stopping(self) -> bool:
        """Whether it has been told to end: what it were given now would end with it."""
        return self._stopping

    @property
    def away(self) -> Away | None:
        """What is known of its WorkAgent while that is being started again."""
        return self._executor.away

    @property
    def used_up(self) -> bool:
        """Whether its WorkAgent was started again more often in a row than is allowed."""
        return self._executor.used_up

    @property
    def restarting(self) -> str | None:
        """Why its WorkAgent is being started again, while it is."""
        return self._recovery.restarting

    @property
    def mean_step_s(self) -> float | None:
        """Seconds a step takes, of late; None before the first."""
        return self._times.mean_s

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, those still in the inbox included."""
        return self.scheduler.num_waiting + len(self._inbox)

    @property
    def has_steps(self) -> bool:
        """Whether its WorkAgent computes one, or has one before it."""
        return bool(self._in_flight)

    # --- the engine's own thread ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Steps until stopped or the WorkAgent is gone; every request has got its last piece when it returns."""
        reason, kind = "the server is shutting down", FinishReason.UNAVAILABLE
        try:
            while not self._stopping:
                if not self.step():
                    self._record_load()
                    self._wait()
            while self._in_flight:
                self._collect()
        except LLMServingError as error:
            if not self._stopping:
                reason = f"the WorkAgent is gone: {error}"
                logger.error("engine loop ends: %s", reason)
        except BaseException as error:  # also what is no Exception, as a panic in a library written in Rust
            reason, kind = f"internal error: {error}", FinishReason.ERROR
            logger.exception("engine loop ends")
        self._shut(reason, kind)
        self.close()

    def step(self) -> bool:
        """Submits the next step as late as it can, then collects the oldest; False when there was nothing to do."""
        try:
            self._executor.await_ending()
            self._listen()
            progressed = self._advance()
        except (StepFailedError, WorkerError) as error:
            self._recover(error)
            progressed = True
        self._flush()
        return progressed

    @property
    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests or bool(self._inbox)

    @property
    def idle_s(self) -> float | None:
        """Seconds after which there may be something to do although no message comes; None: then there will not."""
        now = self._clock()
        timeouts_s = [self.scheduler.batch_wait_s(now)] if len(self.scheduler.waiting) else []
        if (deadline := self._deadlines.next) is not None:
            timeouts_s.append(max(0.0, deadline - now))
        return min(timeouts_s, default=None)

    def _advance(self) -> bool:
        if not self.scheduler.has_unfinished_requests:
            self.peers.catch_up()
            self._auditor.run_copy()
        replied = bool(self._in_flight) and self._waits_for_replies()
        if replied:
            # Told when the next step is under way: until then whoever tells the clients would only be in its way.
            self._collect()
            self._listen()
        self._propose_drafts()
        now = self._clock()
        schedule = self._schedule(now)
        if schedule is not None:
            self._submit(schedule, now)
        collects = bool(self._in_flight) and (schedule is None or len(self._in_flight) == self._max_steps_in_flight)
        if collects:
            self._collect()
        # What was collected may let something be scheduled that could not be before.
        return schedule is not None or collects or replied

    def _listen(self) -> None:
        """Takes what others ask for, and ends who has no time left."""
        if self._inbox:
            self.peers.catch_up()
            self._inbox.take()
        if self._deadlines.next is not None:
            now = self._clock()
            self._inbox.take()  # whoever was given more time until now
            self._overdue.end(now, self.ttft_predictor, self._times.began)

    def _propose_drafts(self) -> None:
        """Give the scheduler draft tokens for the next step."""
        if self._drafter is None:
            return
        waits = not self._in_flight and self._waits_for_replies()
        for request, token_ids in self._drafter.propose(len(self.scheduler.running), synchronous=waits):
            self.scheduler.draft(request, token_ids)

    def _schedule(self, now: float) -> Schedule | None:
        """Forms the next step, as far as there is one, and tells who is to know of it."""
        self.peers.listen()
        schedule = self.scheduler.schedule(now)
        self._reports.formed(schedule, self._in_flight, now)
        self.moves.formed(schedule)
        self.peers.tell(schedule)
        self.journal.decided(now, self.scheduler.blocked)
        return schedule

    def _submit(self, schedule: Schedule, now: float) -> None:
        """Has the WorkAgent compute a step that was formed from `now` on."""
        self.journal.formed(now, schedule)
        self._executor.submit(self.build_step(schedule, self._executor.next_step), self.forms_late)
        self._times.submitted(now, self._clock(), follows=bool(self._in_flight))
        self._in_flight.append(schedule)
        self._allow()
        self.moves.submitted(schedule, now)
        if schedule.started:
            self.on_started([request.asked.request_id for request in schedule.started])

    @property
    def forms_late(self) -> bool:
        """Whether the next step but one is formed when the next one ends, not when it begins."""
        return self._max_steps_in_flight > 1 and self._times.step_s > SHORT_STEP_S

    def _waits_for_replies(self) -> bool:
        """Whether more tokens come in the same time if no step is formed ahead.

        That costs the master's time in each step; but drafts depend on the newest token, and whoever
        waits for replies takes part in every other step only if one is formed ahead.
        """
        if self._max_steps_in_flight == 1:
            return True
        if self._drafter is not None and self._drafter.pays and not self._prompts_come():
            return True
        running = self.scheduler.running
        num_waiting = sum([request.waits_for_reply for request in running])
        step_s, host_s = self._times.step_s, self._times.host_s
        return num_waiting * (step_s + host_s) > 2 * len(running) * host_s

    def _prompts_come(self) -> bool:
        """Whether, as far as is known, the next step computes prompts, and so verifies no draft tokens."""
        blocked = self.scheduler.blocked
        room = blocked is None or blocked.reason in NO_ROOM
        return self._reports.num_left > 0 or (room and len(self.scheduler.waiting) > 0)

    def _collect(self) -> None:
        """Takes the reply to the oldest step."""
        output = self._executor.collect()
        self._times.replied(self._clock())
        schedule = self._in_flight.popleft()
        self.moves.step_done()
        updated = self.scheduler.update(schedule, output.token_ids.tolist())
        self._allow()
        now = self._clock()
        self._times.passed_on(now)
        self._reports.went_on(self._in_flight, now)
        deliver(schedule, updated, output)
        self._processor.report_times()
        self.moves.delivered(schedule, now)
        self._take_stock(schedule, updated, now)
        if schedule.departures:  # whoever departs takes its tenant's place along, so before others are dealt any
            self._flush()
        self._times.settled(self._clock())

    def _take_stock(self, schedule: Schedule, updated: list[Request], now: float) -> None:
        """A step has been replied to: journal, drafter, metrics and predictions learn of it."""
        accepted = accepted_drafts(schedule, updated) if schedule.has_drafts else NO_DRAFTS
        self.journal.replied(now, accepted)
        self.num_steps += 1
        num_tokens = schedule.num_tokens
        ended = [request for request in updated if request.is_finished]
        if self._drafter is not None:
            if num_tokens == schedule.num_samples:  # no prompt was computed
                host_s = self._times.host_s if self._max_steps_in_flight > 1 else 0.0
                self._drafter.record_step_time(num_tokens, self._times.computed_s, host_s)
            self._tell_drafter(self._drafter, schedule, ended, accepted)
        self._record(schedule, num_tokens)
        self._reports.replied(schedule, num_tokens, len(ended))

    def _allow(self) -> None:
        """Tells the WorkAgent what the oldest step in flight may choose, as all before it have been replied to.

        It computes that step meanwhile, and needs to know at its end only.
        """
        if self._executor.awaits_allowed:
            self._executor.allow(self._builder.allowed(self._in_flight[0]))

    def _tell_drafter(
        self, drafter: SpeculationController, schedule: Schedule, ended: list[Request], accepted: Mapping[int, int]
    ) -> None:
        if schedule.has_drafts:
            for row in schedule.rows:
                if row.num_drafts:
                    num_accepted = accepted.get(row.request.sequence, 0)
                    counts = drafter.record_verified(row.request, row.num_drafts, num_accepted)
                    self._metrics.record_verified_drafts(counts)
        drafter.record_step(ended, len(schedule.rows))

    def _record(self, schedule: Schedule, num_tokens: int) -> None:
        self._metrics.step(*self._load(), num_tokens, replica=self.index)
        if schedule.preempted:
            self._metrics.preempted(len(schedule.preempted))
            for request in schedule.preempted:
                self._metrics.classes.preempted(request.priority)
        self._metrics.swaps.scheduled(schedule.block_moves, schedule.preemptions)
        if schedule.num_bound_violations:
            self._metrics.bound_violated(schedule.num_bound_violations)

    def _record_load(self) -> None:
        self._metrics.load(*self._load(), replica=self.index)

    def _load(self) -> tuple[int, int, float]:
        """Requests running and waiting, and the used share of the cache."""
        return len(self.scheduler.running), self.scheduler.num_waiting, self.scheduler.blocks.usage

    def _swap_load(self) -> SwapLoad:
        blocks = self.scheduler.blocks
        return SwapLoad(blocks.num_swapped_requests, blocks.host_pool.num_used_blocks, blocks.host_pool.num_blocks)

    def _recover(self, error: LLMServingError) -> None:
        """Goes on after a step that failed or a WorkAgent that is gone; only what makes it happen again ends."""
        self.journal.lost(self._clock())
        lost, self._in_flight = self._in_flight, deque()
        self._reports.lost()
        culprits = self._recovery.culprits(error, list(lost))
        self.moves.lost()
        self.journal.recovered(self._clock())
        for request in culprits:
            end(request, FinishReason.ERROR, str(error))

    def _while_away(self, reason: str) -> None:
        """After an attempt to start the WorkAgent again: nobody waits longer than is allowed."""
        self._listen()
        away = self._executor.away
        if away is not None and self._clock() - away.since > self._restart_wait_s:
            error = f"its WorkAgent has not come back within {self._restart_wait_s:g} s: {reason}"
            self._end_all(error, FinishReason.UNAVAILABLE)
        self._flush()
        self.on_away()

    def _while_tried(self) -> None:
        """Between steps that look for who makes them fail: who has no time left does not wait for the last of them."""
        self._listen()
        self._flush()

    def _add(self, request: Request) -> None:
        self._auditor.started(request)
        self._expect(request)
        self.receive(request, self._desk)
        self.journal.queued(request, self._clock())

    def _arrive(self, departure: Departure, is_cancelled: bool) -> None:
        self.peers.arrived(departure.request)
        self._expect(departure.request)
        self.moves.arrive(departure)
        self.journal.queued(departure.request, self._clock())
        if is_cancelled:
            end(departure.request, FinishReason.ABORT)

    def _expect(self, request: Request) -> None:
        if self._drafter is not None:
            self._drafter.add_request(request)
        self._deadlines.add(request)

    def _abort(self, request_id: str) -> None:
        request = self._processor.find(request_id)
        if request is not None:
            end(request, FinishReason.ABORT)

    def _shut(self, reason: str, kind: FinishReason) -> None:
        self._inbox.end(reason)
        self._inbox.take()
        self._end_all(reason, kind)
        self.moves.end()
        self._flush()
        self._record_load()

    def _end_all(self, reason: str, kind: FinishReason) -> None:
        self._auditor.drop()
        for request in self._processor.unfinished():
            end(request, kind, reason)

    # --- inbox and outbox -------------------------------------------------------------------------------------------

    def _post_nothing(self) -> None:
        with contextlib.suppress(WorkerDiedError):
            self._inbox.post(lambda: None)

    def _tell(self, piece: RequestOutput) -> None:
        self._outputs.append(piece)

    def _flush(self) -> None:
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._auditor.told(outputs)
            self._publish(outputs)
        self.moves.published()

    def _wait(self) -> None:
        """Sleeps until a message comes, the WorkAgent dies, a deadline passes or a batch has waited long enough."""
        if self._inbox.wait(self._executor.fileno(), self.idle_s):
            try:
                self._executor.collect()  # nothing is in flight, so only bad news can have come
            except WorkerError as error:
                self._recover(error)


def accepted_drafts(schedule: Schedule, updated: list[Request]) -> dict[int, int]:
    """Return `Request.sequence` -> accepted draft tokens, for the rows with drafts of a step with a reply."""
    got = set(updated)
    return {
        row.request.sequence: row.request.num_new_tokens - 1
        for row in schedule.rows
        if row.num_drafts and row.request in got
    }
