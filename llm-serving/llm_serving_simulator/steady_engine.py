"""What an engine does at a step that is like the one before, without a look at each of its requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from llm_serving.admission.ttft_predictor import InFlightSteps
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.engine import Engine
from llm_serving.engine.sinks import OneSequence
from llm_serving.scheduler.schedule import Schedule

from llm_serving_simulator.counted_answer import CountedAnswer, Told
from llm_serving_simulator.steady import SteadySteps, num_steps_alike
from llm_serving_simulator.step_shape import StepShape
from llm_serving_simulator.virtual_agent import VirtualAgent, VirtualStep, reply_of
from llm_serving_simulator.virtual_drafter import VirtualSpeculationController, keep_state

MOST_STEPS: Final = 64
"""At once, before others have a look."""

Arrivals = list[float]
"""When the token of each request of a step is at its client, in the order of the rows."""
Deliver = Callable[[float, int], Arrivals | None]
"""Has so many tokens go to their clients at a time; None: something else happens before, they are to be published."""


class SteadyEngine:
    """Steps an engine whose next steps are like the newest one; `Engine.step` does the same, request by request.

    Args:
        engine: That of a simulation, with no step formed since its requests were looked at.
        agent: Its executor.
        drafter: Its speculation controller; None: there is none.
        steps: What its scheduler decides.
        predicts: Whether its engine tells what it measures to those who predict.
        deliver: Of the world.
    """

    def __init__(
        self,
        engine: Engine,
        agent: VirtualAgent,
        drafter: VirtualSpeculationController | None,
        steps: SteadySteps,
        predicts: bool,
        deliver: Deliver,
    ) -> None:
        self._engine, self._agent, self._steps, self._predicts = engine, agent, steps, predicts
        self._drafter, self._deliver = drafter, deliver
        if drafter is not None:
            drafter.ngram.settle = steps.settle_one
        self.goes_on = True
        """False: the next step is another, and the engine is as it would be."""
        self._answers = [each.receiver for each in steps.rows if type(each.receiver) is CountedAnswer]
        self._all_are_counted = len(self._answers) == len(steps.rows)
        self._num_in_flight = len(engine._in_flight)
        self._newest: VirtualStep | None = None

    @classmethod
    def of(
        cls,
        engine: Engine,
        agent: VirtualAgent,
        drafter: VirtualSpeculationController | None,
        newest: Schedule,
        predicts: bool,
        deliver: Deliver,
    ) -> SteadyEngine | None:
        """None: the next step may be unlike the newest that was formed, or it ends somebody."""
        num_in_flight = len(engine._in_flight)
        if num_in_flight != engine._max_steps_in_flight - 1 or (drafter is not None and drafter.pays):
            return None
        scheduler = engine.scheduler
        if engine._inbox or not SteadySteps.are_alike(scheduler, newest, num_in_flight):
            return None
        running = scheduler.running
        if not all(map(_is_answered, running)):
            return None
        num_steps = num_steps_alike(running, agent.num_output)
        if num_steps < 1:
            return None
        steps = SteadySteps(scheduler, num_in_flight, num_steps, agent.tokens_of)
        return cls(engine, agent, drafter, steps, predicts, deliver)

    def advance(self) -> int:
        """As `Engine.step` as often as it returns, until something else is to happen."""
        arrivals: list[Arrivals] = []
        num_steps = 0
        while num_steps < MOST_STEPS:
            self.goes_on = self._step()
            if not self.goes_on:
                break
            num_steps += 1
            times = self._deliver(self._engine._clock(), len(self._answers)) if self._all_are_counted else None
            if times is None:
                self._publish()
                break
            arrivals.append(times)
        for answer, of_one in zip(self._answers, zip(*arrivals, strict=True), strict=False):
            answer.outcome.token_times_s.extend(of_one)
        if not self.goes_on:
            self._leave()
        return num_steps

    def settle(self) -> None:
        """All requests are as they would be; it may go on."""
        self._steps.settle()

    def _step(self) -> bool:
        """Whether the next step was like the one before; otherwise nothing was done."""
        engine, agent, steps, clock = self._engine, self._agent, self._steps, self._engine._clock
        drafter = self._drafter
        agent.await_ending()
        now = clock()
        if engine._inbox or self._is_late(now) or (drafter is not None and drafter.pays):
            return False
        engine.peers.listen()
        num_keys, num_rows = steps.num_keys, len(steps.rows)
        if not steps.form():
            return False
        engine.peers.tell()
        if self._predicts:
            engine.ttft_predictor.record_running(len(steps.rows))
        shape = StepShape(num_rows, num_rows, num_rows, num_keys, 0, 0)
        self._newest = VirtualStep(agent.next_step, shape, [])
        agent.submit(self._newest, engine.forms_late)
        engine._times.submitted(now, clock(), follows=self._num_in_flight > 0)
        self._tell_under_way(self._num_in_flight + 1)
        agent.finish_oldest()
        replied = clock()
        engine._times.replied(replied)
        steps.reply()
        engine._times.passed_on(replied)
        self._tell_under_way(self._num_in_flight)
        engine.num_steps += 1
        if drafter is not None:
            drafter.record_step_time(num_rows, engine._times.step_s, engine._times.host_s)
            drafter.record_step((), num_rows)
        engine._step_metrics.record_step(num_rows)
        if self._predicts:
            engine.ttft_predictor.record_step(
                num_tokens=num_rows, num_rows=num_rows, seconds=engine._times.step_s, num_finished=0
            )
        engine._times.settled(clock())
        return True

    def _publish(self) -> None:
        """The tokens of the step that was replied to go to the clients, in pieces where an audit reads them."""
        engine = self._engine
        told: list[Told] = [*self._answers]
        if not self._all_are_counted:
            told = []
            for request in self._steps.rows:
                if type(request.receiver) is CountedAnswer:
                    told.append(request.receiver)
                else:
                    told += self._pieces_of(request)
            engine._processor.report_times()
            engine._auditor.told(told)  # type: ignore[arg-type]
        if told:
            engine._publish_outputs(told)  # type: ignore[arg-type]

    def _pieces_of(self, request: Request) -> list[RequestOutput]:
        """What the newest reply has its client be told; nothing of what nobody but an audit waits for."""
        assert request.receiver is not None
        self._steps.settle_one(request)
        request.receiver.take(request, range(1), reply_of(0, request.output_token_ids[-1:]))
        pieces, self._engine._outputs = self._engine._outputs, []
        return pieces

    def _leave(self) -> None:
        """The engine goes on, request by request."""
        self.settle()
        if self._drafter is not None:
            self._drafter.ngram.settle = keep_state
        if self._newest is not None and self._num_in_flight:
            engine = self._engine
            engine._in_flight = deque(self._steps.in_flight())
            self._newest.samples.extend([_sample(each) for each in self._steps.rows])

    def _is_late(self, now: float) -> bool:
        """Whether the engine would look for requests that are too late, and perhaps end some."""
        return self._engine._overdue.is_due(now)

    def _tell_under_way(self, num_steps: int) -> None:
        if self._predicts:
            self._engine.ttft_predictor.in_flight = InFlightSteps(num_steps, 0, 0, self._engine._times.began)


def _is_answered(request: Request) -> bool:
    """Whether it has got a token, and its client, or an audit of it, is told of the next by no more than that."""
    counts = type(request.receiver) in (CountedAnswer, OneSequence) and request.transfer is None
    return counts and bool(request.output_token_ids)


def _sample(request: Request) -> tuple[int, int]:
    """As `virtual_step` has it, of the request's newest row."""
    return request.sampling.seed or 0, request.num_computed_tokens
