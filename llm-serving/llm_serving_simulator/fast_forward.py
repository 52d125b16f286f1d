"""Fast-forwarded decode steps: consecutive steps of the same requests, decided without a loop over the requests.

While every running request decodes, no request waits and none finishes, the next step has the rows of the step before,
each one token further. What else the scheduler does is then the same for every row, or concerns the rows that fill a
block. The requests themselves are updated when another part reads them (`settle`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from llm_serving.admission.ttft_predictor import InFlightSteps
from llm_serving.core.request import FINISHED, FinishReason, Request
from llm_serving.core.request_output import PromptLogprobs, RequestOutput
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.engine.engine import Engine
from llm_serving.engine.sinks import SequenceSink, SinkContext
from llm_serving.scheduler.fair_sharing import OUTPUT_TOKEN_WEIGHT
from llm_serving.scheduler.schedule import Schedule, ScheduledRow
from llm_serving.scheduler.scheduler import Scheduler

from llm_serving_simulator.figures import Outcome
from llm_serving_simulator.profile import StepShape
from llm_serving_simulator.virtual_work_agent import (
    VirtualSpeculationController,
    VirtualStep,
    VirtualWorkAgent,
    keep_state,
    step_output,
)

MAX_STEPS: Final = 64
"""Steps that are fast-forwarded at once, before other parts of the simulation run."""
_ONE_TOKEN: Final = (0,)

ArrivalTimes = list[float]
"""When the token of each row of a step reaches its client."""
SendTokens = Callable[[float, int], ArrivalTimes | None]
"""Sends a number of tokens at a time; returns None if another event comes first, so that they must be published."""
TokensAt = Callable[[Request, int, int], list[int]]
"""Returns the tokens that a request gets at positions [start, end)."""


class TokenCounter:
    """The output sink of a simulated request. It reports a token that is neither the first nor the last of an answer
    without a `RequestOutput`.
    """

    __slots__ = ("_context", "_emit", "active_requests", "outcome", "request", "request_id")

    def __init__(self, request: Request, context: SinkContext, outcome: Outcome) -> None:
        self.request, self.request_id = request, request.request_id
        self.active_requests = (request,)
        self.outcome = outcome
        self._context: Any = context
        self._emit: Any = context.emit  # looked up once, because it is called for each token

    def start(self) -> None:
        self._context.scheduler.add(self.request)

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        if request.status is not FINISHED and len(request.output_token_ids) > 1:
            for _ in samples:
                self._emit(self)
            return
        for _ in samples[1:]:
            self._emit(self)
        self._emit(self._output(_ONE_TOKEN))
        if request.is_finished:
            request.sink = None

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None: ...

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        request = self.request
        if request.sink is None:
            return
        self._context.scheduler.finish(request, reason)
        request.finish_reason, request.sink = reason, None
        self._emit(self._output((), error))

    def set_priority(self, priority: int) -> bool:
        return bool(self._context.scheduler.set_priority(self.request, priority))

    def _output(self, token_ids: tuple[int, ...], error: str | None = None) -> RequestOutput:
        request = self.request
        counts = len(request.prompt_token_ids), request.num_cached_tokens, len(request.output_token_ids)
        end = request.finish_reason, request.stop_reason, error
        return RequestOutput(request.request_id, "", token_ids, (), *counts, *end)


EngineOutput = RequestOutput | TokenCounter
"""What a simulated engine publishes."""


class FastForwardScheduler:
    """Does what `schedule` and `update` of a scheduler would do while steps are uniform.

    The `scheduler`, whose `is_uniform` must be true, is up to date except for its running requests; after `settle`
    these are too. `num_in_flight`: scheduled steps without a reply, at most one. `num_steps`: steps that may be
    scheduled before a request finishes. `tokens_at`: returns the sampled tokens.
    """

    def __init__(self, scheduler: Scheduler, num_in_flight: int, num_steps: int, tokens_at: TokensAt) -> None:
        self.num_scheduled = self.num_replied = 0
        self._settled = 0, 0
        """(`num_scheduled`, `num_replied`) at the last `settle`."""
        self._scheduler, self._num_in_flight, self._num_steps = scheduler, num_in_flight, num_steps
        self._tokens_at = tokens_at
        self.rows = list(scheduler.running)
        self.num_keys = sum([each.num_computed_tokens for each in self.rows]) + len(self.rows)
        """Keys that the next step reads."""
        self._first_step = scheduler.num_steps
        self._starts = {each: (each.num_computed_tokens, len(each.output_token_ids)) for each in self.rows}
        block_size = scheduler.blocks.block_size
        self._growing: dict[int, list[Request]] = defaultdict(list)
        """Requests that need a new block, by number of the scheduled step modulo the block size."""
        self._filling: dict[int, list[Request]] = defaultdict(list)
        """Requests that have filled a block, by number of the reply modulo the block size."""
        self._charges: dict[tuple[str, str], int] = defaultdict(int)
        self._tokens: dict[str, int] = defaultdict(int)
        for each in self.rows:
            self._growing[-each.num_computed_tokens % block_size].append(each)
            self._filling[(num_in_flight - 1 - each.num_computed_tokens) % block_size].append(each)
            self._charges[each.request_class.name, each.tenant] += OUTPUT_TOKEN_WEIGHT
            self._tokens[each.request_class.name] += OUTPUT_TOKEN_WEIGHT

    @staticmethod
    def is_uniform(scheduler: Scheduler, newest: Schedule, num_in_flight: int) -> bool:
        """Whether every request gets one token in the newest step and, if none arrives or finishes, in the next."""
        running, step = scheduler.running, newest.step

        def continues(row: ScheduledRow, request: Request) -> bool:
            num_computed = row[1] + 1
            return (
                row[0] is request
                and row[2] == row[3] == 1
                and row[4] == request.num_preemptions
                and request.num_computed_tokens == num_computed
                and request.num_confirmed_tokens == num_computed - num_in_flight
                and request.num_tokens_in_flight == num_in_flight
                and request.num_uncomputed_tokens == 1
                and request.last_scheduled_step == step
                and not (request.paused or request.needs_known_output or request.num_lost_steps)
            )

        if len(newest.rows) != len(running) or scheduler.num_waiting or not running or not _can_fast_forward(scheduler):
            return False
        return step == scheduler.num_steps - 1 and all(map(continues, newest.rows, running))

    def schedule(self) -> bool:
        """Schedule a step; return False, without a change, if it would not be uniform."""
        scheduler = self._scheduler
        blocks = scheduler.blocks
        growing = self._growing.get(self.num_scheduled % blocks.block_size, ())
        if self.num_scheduled >= self._num_steps or len(growing) > blocks.pool.num_free_blocks:
            return False
        scheduler.policy.prefer(len(self.rows), prompts_wait=False)
        if not self.num_scheduled:
            scheduler.waiting.update_contenders((), scheduler.slots_by_class)
        for request in growing:
            self.settle_one(request)
            scheduler.slots.grow(request)
        self.num_scheduled += 1
        self.num_keys += len(self.rows)
        _fast_forward_step(scheduler, self._charges, self._tokens)
        return True

    def update(self) -> None:
        """Apply the reply of the oldest step."""
        blocks = self._scheduler.blocks
        filling = self._filling.get(self.num_replied % blocks.block_size, ()) if blocks.prefix_caching else ()
        for request in filling:
            self.settle_one(request)
            blocks.cache_full_blocks(request, request.num_confirmed_tokens + 1)
        self.num_replied += 1

    def settle(self) -> None:
        if self._settled != (settled := (self.num_scheduled, self.num_replied)):
            self._settled = settled
            for request in self.rows:
                self.settle_one(request)

    def settle_one(self, request: Request) -> None:
        """Apply all steps to a request, if it is one of the rows."""
        if (start := self._starts.get(request)) is None:
            return
        num_computed, num_output = start
        output = request.output_token_ids
        missing = num_output + self.num_replied - len(output)
        if missing:
            position = len(request.prompt_token_ids) + len(output)
            output += self._tokens_at(request, position, position + missing)
            request.num_new_tokens = 1
        request.num_computed_tokens = num_computed + self.num_scheduled
        request.num_confirmed_tokens = num_computed - self._num_in_flight + self.num_replied
        request.num_tokens_in_flight = self._num_in_flight + self.num_scheduled - self.num_replied
        request.last_scheduled_step = self._first_step - 1 + self.num_scheduled

    def in_flight(self) -> list[Schedule]:
        """Return the scheduled steps without a reply, as `Scheduler.schedule` would have returned them."""
        number = self._first_step + self.num_scheduled - 1
        rows = [ScheduledRow(each, each.num_computed_tokens - 1, 1, 1, each.num_preemptions) for each in self.rows]
        return [Schedule(number, rows, num_tokens=len(rows), num_samples=len(rows))] * self._num_in_flight


class FastForwardEngine:
    """Runs uniform steps of an engine; `Engine.step` does the same, request by request.

    The newest step of `engine` was scheduled with its requests up to date. `agent`: its executor. `drafter`: None:
    speculative decoding is off. `predicts`: whether the engine reports to the TTFT predictor.
    """

    def __init__(
        self,
        engine: Engine,
        agent: VirtualWorkAgent,
        drafter: VirtualSpeculationController | None,
        steps: FastForwardScheduler,
        predicts: bool,
        send_tokens: SendTokens,
    ) -> None:
        self._engine, self._agent, self._steps, self._predicts = engine, agent, steps, predicts
        self._drafter, self._send_tokens = drafter, send_tokens
        if drafter is not None:
            drafter.ngram.settle = steps.settle_one
        self.is_active = True
        """False: the next step is not uniform, and the engine is up to date."""
        self._counters = [each.sink for each in steps.rows if type(each.sink) is TokenCounter]
        self._all_counted = len(self._counters) == len(steps.rows)
        self._num_in_flight = len(engine._in_flight)
        self._newest: VirtualStep | None = None

    @classmethod
    def start(
        cls,
        engine: Engine,
        agent: VirtualWorkAgent,
        drafter: VirtualSpeculationController | None,
        newest: Schedule,
        predicts: bool,
        send_tokens: SendTokens,
    ) -> FastForwardEngine | None:
        """Return None if the next step may differ from the newest one, or finishes a request."""
        num_in_flight = len(engine._in_flight)
        if num_in_flight != engine._max_steps_in_flight - 1 or (drafter is not None and drafter.pays):
            return None
        scheduler = engine.scheduler
        if engine._inbox.messages or not FastForwardScheduler.is_uniform(scheduler, newest, num_in_flight):
            return None
        running = scheduler.running
        if not all(map(_gets_one_token, running)):
            return None
        num_steps = num_uniform_steps(running, agent.num_output)
        if num_steps < 1:
            return None
        steps = FastForwardScheduler(scheduler, num_in_flight, num_steps, agent.tokens_of)
        return cls(engine, agent, drafter, steps, predicts, send_tokens)

    def advance(self) -> int:
        """Run steps until something else must happen; return their number."""
        arrivals: list[ArrivalTimes] = []
        num_steps = 0
        while num_steps < MAX_STEPS:
            self.is_active = self._step()
            if not self.is_active:
                break
            num_steps += 1
            times = self._send_tokens(self._engine._clock(), len(self._counters)) if self._all_counted else None
            if times is None:
                self._publish()
                break
            arrivals.append(times)
        for counter, token_times in zip(self._counters, zip(*arrivals, strict=True), strict=False):
            counter.outcome.token_times_s.extend(token_times)
        if not self.is_active:
            self._stop()
        return num_steps

    def settle(self) -> None:
        """Apply all steps to all requests; more steps may follow."""
        self._steps.settle()

    def _step(self) -> bool:
        """Run one step; return False, without a change, if it would not be uniform."""
        engine, agent, steps, clock = self._engine, self._agent, self._steps, self._engine._clock
        drafter = self._drafter
        agent.await_ending()
        now = clock()
        if engine._inbox.messages or engine._deadlines.is_due(now) or (drafter is not None and drafter.pays):
            return False
        if engine.fleet is not None:
            engine.fleet.synchronize()
        num_keys, num_rows = steps.num_keys, len(steps.rows)
        if not steps.schedule():
            return False
        if engine.fleet is not None:
            engine.fleet.report()
        if self._predicts:
            engine.ttft_predictor.record_running(num_rows)
        shape = StepShape(num_rows, num_rows, num_rows, num_keys, 0, 0)
        self._newest = VirtualStep(agent.next_step, shape, [])
        agent.submit(self._newest, engine.forms_late)
        engine._times.record_submitted(now, clock(), follows=self._num_in_flight > 0)
        self._report_in_flight(self._num_in_flight + 1)
        agent.finish_oldest()
        replied = clock()
        engine._times.record_reply(replied)
        steps.update()
        engine._times.record_updated(replied)
        self._report_in_flight(self._num_in_flight)
        engine.num_steps += 1
        if drafter is not None:
            drafter.gain.record_step(num_rows, engine._times.step_s, engine._times.host_s)
            drafter.measured.add(num_rows, 1.0, engine._times.step_s, has_prompts=False, pays=False)
            drafter.record_step((), num_rows)
        engine._step_metrics.record_load(num_rows)
        if self._predicts:
            engine.ttft_predictor.record_step(
                num_tokens=num_rows, num_rows=num_rows, seconds=engine._times.step_s, num_finished=0
            )
        engine._times.record_published(clock())
        return True

    def _publish(self) -> None:
        """Publish the tokens of the newest reply; requests that an audit reads get a `RequestOutput` each."""
        engine = self._engine
        outputs: list[EngineOutput] = [*self._counters]
        if not self._all_counted:
            outputs = []
            for request in self._steps.rows:
                if type(request.sink) is TokenCounter:
                    outputs.append(request.sink)
                else:
                    outputs += self._outputs_of(request)
            engine._processor.flush_token_gaps()
            engine._auditor.record(outputs)  # type: ignore[arg-type]
        if outputs:
            engine._publish_outputs(outputs)  # type: ignore[arg-type]

    def _outputs_of(self, request: Request) -> list[RequestOutput]:
        """Return what the newest reply reports to the request's client; nothing for an audit's own request."""
        assert request.sink is not None
        self._steps.settle_one(request)
        request.sink.add_tokens(request, range(1), step_output(0, request.output_token_ids[-1:]))
        outputs = self._engine._outputs.copy()
        self._engine._outputs.clear()
        return outputs

    def _stop(self) -> None:
        """Bring the engine up to date, so that it continues request by request."""
        self.settle()
        if self._drafter is not None:
            self._drafter.ngram.settle = keep_state
        if self._newest is not None and self._num_in_flight:
            self._engine._in_flight = deque(self._steps.in_flight())
            self._newest.samples.extend(
                [(each.sampling.seed or 0, each.num_computed_tokens) for each in self._steps.rows]
            )

    def _report_in_flight(self, num_steps: int) -> None:
        if self._predicts:
            self._engine.ttft_predictor.in_flight = InFlightSteps(num_steps, 0, 0, self._engine._times.began)


def num_uniform_steps(running: Sequence[Request], num_output: Callable[[Request], int]) -> int:
    """Return how many steps may be scheduled before one of the requests reaches its number of output tokens."""
    return min([num_output(each) - len(each.output_token_ids) for each in running]) - 1


def _gets_one_token(request: Request) -> bool:
    """Whether the request has a token already, and its sink handles the next one without other state."""
    is_simple = type(request.sink) in (TokenCounter, SequenceSink) and request.transfer is None
    return is_simple and bool(request.output_token_ids)


def _can_fast_forward(scheduler: Scheduler) -> bool:
    """Return whether all requests only decode, and no sliding window, static batch, beam search or tenant limit affects
    the next step.
    """
    limiter = scheduler.waiting_requests.tenant_limiter
    limited = scheduler.closed_classes or limiter.full_tenants or limiter.has_changed_demand
    is_plain = not (limited or scheduler.blocks.has_sliding_window or scheduler.limits.static_batching)
    return is_plain and not scheduler.has_special_requests


def _fast_forward_step(scheduler: Scheduler, charges: Mapping[tuple[str, str], int], tokens: Mapping[str, int]) -> None:
    """Account for a step that only decodes. `charges`: (class, tenant) -> virtual tokens. `tokens`: class -> tokens."""
    slots, waiting = scheduler.slots, scheduler.waiting
    waiting.charge(charges)
    waiting.sharing.charge(slots.slots_by_class, tokens, slots.blocks_by_class, (), ())
    scheduler.decode.num_steps_without_prefill = 0
    waiting.tick(())
    scheduler.waiting_requests.monitor.tick(())
    scheduler.skip_step()
