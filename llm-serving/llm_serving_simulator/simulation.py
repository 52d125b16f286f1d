"""One simulation of a workload: the shipping admission control, scheduler, blocks and engines under virtual time.

The engine of each replica has a time of its own. The engine that is farthest behind runs next, and the event queue is
as far as the other engines are. So with several replicas a request may arrive up to one step late; with one replica all
times are exact.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import Caller, class_of
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine
from llm_serving.engine.engine_requests import Publish
from llm_serving.engine.fleet.migration import MigratingRequest
from llm_serving.engine.observers import EngineListener
from llm_serving.errors import CapacityError, ConfigError, LLMServingError, RequestError
from llm_serving.models.spec import ModelSpec
from llm_serving.network.caches import ONE_LAYER, CacheLayout

from llm_serving_simulator.fast_forward import EngineOutput, TokenCounter
from llm_serving_simulator.figures import Outcome, SimulationResult, StepCounters
from llm_serving_simulator.files import MAX_INTEGER
from llm_serving_simulator.profile import Profile, RangeMonitor
from llm_serving_simulator.virtual_replica import NO_TOKENIZER, ReplicaOptions, VirtualReplica
from llm_serving_simulator.virtual_time import (
    EngineClock,
    EventQueue,
    SeparateCores,
    SharedInterpreter,
    VirtualEventLoop,
)
from llm_serving_simulator.virtual_work_agent import END_TOKEN, MasterWork, RequestLengths
from llm_serving_simulator.workload import Workload, WorkloadRequest, WorkloadStream

StopEarly = Callable[[Sequence[Outcome], float], bool]
"""Called with the outcomes and the time until now; returns whether to stop the simulation."""
OnFinished = Callable[[float], None]
"""Called with the time at which a client's request has finished."""

MIN_STEPS_PER_CHECK: Final = 64
"""Steps between two calls of `StopEarly`, at least."""
OUTCOMES_PER_STEP: Final = 16
"""Outcomes that these calls may read per step on average: with many requests there are fewer calls."""


class InconsistencyError(LLMServingError):
    """The simulation breaks an invariant of the scheduler; the text has the seed that reproduces it."""


class Simulation:
    """One configuration, workload and profile; `run` simulates it once.

    Args:
        config: A configuration; the files of its model may be missing.
        workload: The requests.
        profile: The costs.
        seed: Seed of the spread of step times.
        name: Name of the configuration in outputs.
        fast_forward: Whether uniform decode steps are fast-forwarded, which changes nothing but the CPU time.

    Raises:
        ConfigError: The workload names an unknown class, or the number of blocks is unknown.
    """

    def __init__(
        self,
        config: ServingConfig,
        workload: Workload,
        profile: Profile,
        seed: int = 1,
        name: str = "",
        *,
        fast_forward: bool = True,
    ) -> None:
        notices, (layout, num_state_slots) = tuple(_notices(config, workload)), _cache_kinds(config)
        speculates = config.scheduler.speculative_method != "none" and workload.has_answer_texts
        self._config = config = _simulated(config)
        self._workload, self._profile, self._seed = workload, profile, seed
        self._events = EventQueue()
        self._cpu = SharedInterpreter() if profile.one_interpreter else SeparateCores()
        self._loop = VirtualEventLoop(self._events)
        self._num_read = 0
        """Requests that the event loop has read."""
        self._num_sent = [0] * config.num_replicas
        """Tokens of each replica that the event loop has sent."""
        self._loop_free_s = 0.0
        """When the event loop has finished its newest work."""
        requests = [request for stream in workload.streams for request in stream.requests]
        _check_classes(config, workload)
        lengths = RequestLengths.of(
            [len(each.prompt_token_ids) for each in requests], [_num_until_eos(each) for each in requests]
        )
        self._numbers = {id(request): number for number, request in enumerate(requests)}
        self._counters, self._range_monitor = StepCounters(config, self._events), RangeMonitor(profile.measured_range)
        spec: Any = SimpleNamespace(vocab_size=END_TOKEN + 1, eos_token_ids=(END_TOKEN,))
        self._master = AsyncEngine(config, spec, NO_TOKENIZER, self._counters, _never_opened, clock=self._events)
        self._result = SimulationResult(name, workload.name, profile, [], notices=notices)
        options = ReplicaOptions(
            config,
            profile,
            lengths,
            [each.answer_token_ids for each in requests] if speculates else [],
            workload.vocab_size,
            layout,
            num_state_slots,
            seed,
            self._counters,
            self._cpu,
            self._range_monitor,
            fast_forward,
            _predicts(config, requests),
        )
        self._wake_times: list[tuple[float, int]] = []
        """Heap of (time, replica), with entries that are out of date."""
        self._pending: set[int] = set()
        """Replicas that may have to wake."""
        self._replicas = [VirtualReplica(self, options, index) for index in range(config.num_replicas)]
        self._result.num_blocks = self._replicas[0].engine.scheduler.blocks.pool.num_blocks
        self._open: dict[str, tuple[Outcome, OnFinished]] = {}
        """Open requests by id."""

    def run(self, stop_early: StopEarly = lambda outcomes, now: False) -> SimulationResult:
        """Simulate the workload to its end, or until `stop_early` returns True.

        Raises:
            InconsistencyError: An invariant of the scheduler is broken.
        """
        num_unchecked = 0
        for stream in self._workload.streams:
            self._start_stream(stream)
        try:
            while (replica := self._next()) is not None:
                num_unchecked += replica.step()
                if num_unchecked >= max(MIN_STEPS_PER_CHECK, len(self._result.outcomes) // OUTCOMES_PER_STEP):
                    num_unchecked = 0
                    self._cpu.forget_before(self._earliest())
                    if stop_early(self._result.outcomes, replica.clock.now):
                        self._result.complete = False
                        return self._finish()
            self._check_end()
        except AssertionError as error:
            raise InconsistencyError(f"seed {self._seed}: {error or 'blocks or slots are not conserved'}") from error
        return self._finish()

    @property
    def master_s(self) -> float:
        """CPU seconds of the master's threads until now."""
        return self._cpu.busy_s

    def _next(self) -> VirtualReplica | None:
        """Run events until a replica is next, and return it; None at the end of the simulation."""
        events, alone = self._events, self._replicas[0] if len(self._replicas) == 1 else None
        while True:
            replica = alone or self._first() or self._replicas[0]
            if (time := events.next_time) <= replica.wake_time and time < math.inf:
                events.run_until(time)
                continue
            if replica.wake_time == math.inf:
                return None
            return replica

    def _first(self, clock: EngineClock | None = None) -> VirtualReplica | None:
        """Return the replica with the earliest wake time; None if all sleep.

        The replica with the given clock is left out: it is running, and reschedules itself at the end of its step.
        """
        wake_times, replicas = self._wake_times, self._replicas
        while wake_times:
            time, index = wake_times[0]
            replica = replicas[index]
            if replica.wake_time == time and replica.clock is not clock:
                return replica
            heapq.heappop(wake_times)
        return None

    def _earliest(self) -> float:
        """Return a time before which no thread works any more."""
        first = self._replicas[0] if len(self._replicas) == 1 else self._first()
        return self._events.now if first is None else min(self._events.now, first.wake_time)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _start_stream(self, stream: WorkloadStream) -> None:
        if stream.concurrency is None:
            for request in stream.requests:
                self._send(request, request.due_s, _ignore_end)
            return
        rest = iter(stream.requests)

        def send_next(now: float) -> None:
            if (request := next(rest, None)) is not None:
                self._send(request, now, send_next)

        for _ in range(stream.concurrency):
            send_next(stream.requests[0].due_s if stream.requests else 0.0)

    def _send(self, request: WorkloadRequest, time: float, on_finished: OnFinished) -> None:
        request_class = class_of(request.priority_in(self._config.request_classes), self._config.request_classes)
        num_expected = min(request.num_output_tokens, request.max_tokens)
        num_prompt = len(request.prompt_token_ids)
        outcome = Outcome(request.stream, request_class, request.tenant, num_prompt, num_expected, time)
        self._result.outcomes.append(outcome)
        self._arrive(request, outcome, time, on_finished)

    def _arrive(self, request: WorkloadRequest, outcome: Outcome, time: float, on_finished: OnFinished) -> None:
        """Schedule that the event loop reads the request and then submits it to the master."""

        def read() -> None:
            self._num_read += 1
            self._loop_free_s = self._cpu.reserve(max(self._loop_free_s, self._events.now), self._profile.request_s)
            self._events.at(self._loop_free_s, lambda: self._submit(request, outcome, on_finished))

        self._events.at(time + self._profile.client_s, read)

    def _submit(self, request: WorkloadRequest, outcome: Outcome, on_finished: OnFinished) -> None:
        now, number = self._events.now, self._numbers[id(request)]
        sampling = SamplingParams(
            max_tokens=request.max_tokens, seed=number, ignore_eos=request.ignore_eos, detokenize=False
        )
        caller = Caller(
            priority=request.priority_in(self._config.request_classes),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            source=request.tenant,
            deadline=None if request.timeout_s is None else outcome.due_s + request.timeout_s,
        )
        try:
            stream = self._master.generate(request.prompt_token_ids, sampling, caller, request_id=str(number))
        except CapacityError as error:
            if outcome.num_retries < self._workload.retries and error.retry_after is not None:
                outcome.num_retries += 1
                retry_s = now + math.ceil(error.retry_after)  # the Retry-After header has whole seconds
                self._arrive(request, outcome, retry_s, on_finished)
                return
            self._finish_request(outcome, now, "refused", str(error), on_finished)
        except RequestError as error:
            self._result.num_unservable += 1
            self._result.unservable = self._result.unservable or str(error)
            self._finish_request(outcome, now, "refused", str(error), on_finished)
        else:
            self._open[stream.request_id] = outcome, on_finished
            self._wake_pending()

    def _finish_request(self, outcome: Outcome, time: float, finish: str, error: str, on_finished: OnFinished) -> None:
        outcome.end_s, outcome.finish, outcome.error = time + self._profile.client_s, finish, error
        on_finished(outcome.end_s)

    def send_tokens(self, time: float, count: int, index: int) -> list[float] | None:
        if len(self._replicas) > 1 or self._events.next_time <= time:
            return None
        self._events.now = time
        return self._arrival_times(count, index)

    def _arrival_times(self, count: int, index: int) -> list[float]:
        """Send tokens of a replica one after the other; return when each reaches its client."""
        self._num_sent[index] += count
        start_s, client_s = max(self._loop_free_s, self._events.now), self._profile.client_s
        ends = self._cpu.reserve_each(start_s, self._profile.token_s, count)
        self._loop_free_s = ends[-1]
        return [each + client_s for each in ends]

    def _deliver(self, outputs: Sequence[EngineOutput], publish: Publish, index: int) -> None:
        """Pass outputs of a replica on to the clients, on the event loop."""
        if complete := [output for output in outputs if not isinstance(output, TokenCounter)]:
            publish(complete)
        for output, arrival_s in zip(outputs, self._arrival_times(len(outputs), index), strict=True):
            if isinstance(output, TokenCounter):
                output.outcome.token_times_s.append(arrival_s)
                continue
            outcome, on_finished = self._open[output.request_id]
            outcome.token_times_s += [arrival_s] * len(output.token_ids)
            outcome.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                del self._open[output.request_id]
                finish, error = output.finish_reason.value, output.error or ""
                end_s = arrival_s - self._profile.client_s
                action = functools.partial(self._finish_request, outcome, end_s, finish, error, on_finished)
                self._events.at(arrival_s, action)

    # --- `World`: what replicas need --------------------------------------------------------------------------------

    def drive(self, index: int, make: Callable[[Publish], Engine]) -> Engine:
        engine = self._master.replicas.drive(index, make, self._loop)
        engine.add_listener(_ReplicaWaker(lambda: self._loop.call_soon_threadsafe(self._wake_pending, None)))
        return engine

    def _wake_pending(self, _: None = None) -> None:
        pending, self._pending = self._pending, set()
        for index in pending:
            self._replicas[index].wake(self._events.now)

    def mark_pending(self, index: int) -> None:
        self._pending.add(index)

    def outcome_of(self, request_id: str) -> Outcome:
        return self._open[request_id][0]

    def reschedule(self, time: float, index: int) -> None:
        if len(self._replicas) > 1 and time < math.inf:
            heapq.heappush(self._wake_times, (time, index))

    def set_active(self, clock: EngineClock) -> None:
        self._loop.clock = clock

    def master_work(self, index: int) -> MasterWork:
        return MasterWork(self._num_sent[index], self._num_read / len(self._num_sent))

    def publish_at(self, time: float, outputs: Sequence[EngineOutput], publish: Publish, index: int) -> None:
        self._events.at(time, lambda: self._deliver(outputs, publish, index))

    def run_until(self, time: float, clock: EngineClock) -> None:
        if len(self._replicas) > 1 and (other := self._first(clock)) is not None:
            time = min(time, other.wake_time)
        self._events.run_until(time)
        self._loop.clock = clock

    # --- the result -------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        assert not self._open, f"{len(self._open)} requests wait for ever"
        for replica in self._replicas:
            replica.check_end()

    def _finish(self) -> SimulationResult:
        result, replicas, counters = self._result, self._replicas, self._counters
        span = max((each.end_s for each in result.outcomes), default=0.0)
        result.num_steps = sum(each.engine.num_steps for each in replicas)
        result.num_tokens, result.block_use = counters.num_tokens, counters.block_use
        result.num_extrapolated_steps = self._range_monitor.num_extrapolated
        result.notices += tuple(self._range_monitor.notices(result.num_steps))
        seconds = sum(seconds for each in replicas for start, seconds in each.agent.spans if start < span)
        result.master_share = self._cpu.busy_s / max(span, 1e-9)
        result.busy_share = min(1.0, seconds / max(span * len(replicas), 1e-9))
        result.preemptions, result.bound_violations = counters.num_preempted, counters.num_violations
        result.num_draft_tokens, result.num_accepted_tokens = counters.num_draft_tokens, counters.num_accepted_tokens
        for replica in replicas:
            replica.engine.close()
        return result


def _simulated(config: ServingConfig) -> ServingConfig:
    """Return the configuration without output files, without limits of the model, and without its own drafter."""
    return replace(
        config,
        scheduler=replace(config.scheduler, record_path=None, speculative_method="none", draft_model_path=None),
        serving=replace(config.serving, explain_requests=0, request_log="none", batch_path=None),
        model=replace(config.model, model_path=None, end_token=None),
    )


def _cache_kinds(config: ServingConfig) -> tuple[CacheLayout, int]:
    """Return the groups of the model's layers, and the number of slots for states."""
    path = config.model.model_path
    spec = None if path is None else ModelSpec.from_folder(path)
    if spec is None:
        return ONE_LAYER, 0
    return config.served_spec(spec).layout, config.num_state_slots(spec.state_bytes)


def _notices(config: ServingConfig, workload: Workload) -> Iterator[str]:
    """Yield what of the configuration is not simulated."""
    method = config.scheduler.speculative_method
    if method != "none" and not workload.has_answer_texts:
        yield f"speculative_method {method} proposes no draft tokens: no stream of the load has `recited`"
    if any(each.max_requests_per_minute or each.max_tokens_per_minute for each in config.api_keys):
        yield "rate limits of api_keys are not simulated: no request is refused for them"
    if method in ("draft_model", "mtp"):
        yield f"speculative_method {method} is not simulated: draft tokens are those of n-gram lookup"


def _check_classes(config: ServingConfig, workload: Workload) -> None:
    known = [each.name for each in config.request_classes]
    for stream in workload.streams:
        for name in {each.class_name: None for each in stream.requests}:
            if name not in (None, *known):
                where = stream.class_where or f"{workload.name}: `class` of the stream {stream.name}"
                rule = f"must be one of the configuration: {', '.join(sorted(known))}"
                raise ConfigError(f"{where} {rule}. Given: {name!r}")


def _predicts(config: ServingConfig, requests: list[WorkloadRequest]) -> bool:
    """Whether a decision depends on predicted TTFT: load shedding, deadlines, or routing between replicas."""
    sheds_load = config.scheduler.slo_refusal_factor is not None
    return sheds_load or config.num_replicas > 1 or any(each.timeout_s is not None for each in requests)


def _num_until_eos(request: WorkloadRequest) -> int:
    """Return the output tokens after which the model samples EOS."""
    num = request.num_output_tokens if request.num_output_tokens < request.max_tokens else request.max_tokens + 1
    return min(num, MAX_INTEGER)


def _never_opened(index: int, publish: Publish, on_progress: Callable[[str], None]) -> AbstractContextManager[Engine]:
    raise NotImplementedError("the simulation drives its replicas itself")


def _ignore_end(now: float) -> None:
    """Do nothing: in an open loop no client waits for the end of a request."""


class _ReplicaWaker(EngineListener):
    """Has the event loop wake the replicas whose inboxes got messages, once an engine may have sent some."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake

    def on_migrating(self, requests: list[MigratingRequest]) -> None:
        self._wake()

    def on_woken(self) -> None:
        self._wake()
