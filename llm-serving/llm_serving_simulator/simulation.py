"""One load under one configuration: the shipping door, scheduler, blocks and engines; WorkAgents and time are virtual.

Engines of several replicas each have their own time: the one that is farthest behind goes on, and knows of the world
what has happened up to where the others are. So a request may come to a replica of several up to a step late; with one
replica nothing is early or late.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final

from llm_serving.config.schema import ServingConfig
from llm_serving.core.request_class import Caller, class_of
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.engine import Engine, Publish
from llm_serving.engine.fleet.migration import Departure
from llm_serving.engine.listener import EngineListener
from llm_serving.errors import CapacityError, ConfigError, LLMServingError, RequestError
from llm_serving.models.spec import ModelSpec

from llm_serving_simulator.counted_answer import CountedAnswer, Told
from llm_serving_simulator.document import MOST_WHOLE
from llm_serving_simulator.interpreter import Cores, Interpreter
from llm_serving_simulator.load import Asked, Load, Stream
from llm_serving_simulator.outcome import Outcome
from llm_serving_simulator.profile import Profile
from llm_serving_simulator.reach import Beyond
from llm_serving_simulator.tally import Tally
from llm_serving_simulator.timeline import EngineClock, Timeline, VirtualLoop
from llm_serving_simulator.virtual_agent import END_TOKEN, Beside, Lengths
from llm_serving_simulator.virtual_replica import NO_TOKENIZER, Parts, VirtualReplica


class ContradictionError(LLMServingError):
    """The simulation breaks a law of the scheduler; the text has the seed that shows it."""


@dataclass
class Result:
    """What came of a load."""

    name: str
    """Of the configuration."""
    load: str
    profile: Profile
    outcomes: list[Outcome]
    num_steps: int = 0
    num_tokens: int = 0
    """Computed by all steps, prompts included."""
    num_steps_beyond: int = 0
    """Steps larger than any that the profile was made of."""
    busy_share: float = 0.0
    """Of the time, in which WorkAgents computed."""
    master_share: float = 0.0
    """Of the time, in which the master's threads computed; each counts for itself."""
    preemptions: int = 0
    bound_violations: int = 0
    num_draft_tokens: int = 0
    """Verified draft tokens."""
    num_accepted: int = 0
    """Accepted draft tokens."""
    block_use: list[tuple[float, float]] = field(default_factory=list)
    """(time, share of a replica's blocks in use) after each step of it."""
    num_blocks: int = 0
    """Of each replica."""
    notices: tuple[str, ...] = ()
    complete: bool = True
    """False: it was given up before its end."""
    num_unservable: int = 0
    """Requests that the configuration can never serve, whatever else there is to do."""
    unservable: str = ""
    """Why, of the first of them."""


GivesUp = Callable[[Sequence[Outcome], float], bool]
"""Asked now and then with the outcomes until then and the time, whether the rest is of no interest."""
LOOK_EVERY: Final = 64
"""Steps between two such questions, at least."""
OUTCOMES_PER_STEP: Final = 16
"""That these may look at, on average: where many requests have come it is asked more seldom."""


class Simulation:
    """A configuration, a load and a profile, played once.

    Args:
        config: Any that `load_config` reads; its model need not be there.
        load: What comes.
        profile: What takes how long.
        seed: Of what the profile leaves to chance.
        name: Of the configuration, in what is printed.
        looks_alike: Whether steps that are like the one before are decided at once for all requests, which changes
            nothing but the time that it takes.

    Raises:
        ConfigError: The load names a class that the configuration has not, or nothing tells how many blocks there are.
    """

    def __init__(
        self,
        config: ServingConfig,
        load: Load,
        profile: Profile,
        seed: int = 1,
        name: str = "",
        *,
        looks_alike: bool = True,
    ) -> None:
        notices, window = tuple(_notices(config, load)), _window(config)
        speculates = config.scheduler.speculative_method != "none" and load.has_texts
        self._config = config = _simulated(config)
        self._load, self._profile, self._seed = load, profile, seed
        self._timeline = Timeline()
        self._interpreter = Interpreter() if profile.one_interpreter else Cores()
        self._loop = VirtualLoop(self._timeline)
        self._num_read = 0
        """Requests that have come to the event loop."""
        self._num_sent = [0] * config.num_replicas
        """Tokens of each replica that have."""
        self._loop_free_s = 0.0
        """When the event loop has time for what comes next."""
        requests = [request for stream in load.streams for request in stream.requests]
        _check_classes(config, load)
        lengths = Lengths.of(
            [len(each.prompt_token_ids) for each in requests], [_ends_after(each) for each in requests]
        )
        self._numbers = {id(request): number for number, request in enumerate(requests)}
        self._tally, self._beyond = Tally(config, self._timeline), Beyond(profile.reach)
        spec: Any = SimpleNamespace(vocab_size=END_TOKEN + 1, eos_token_ids=(END_TOKEN,))
        self._master = AsyncEngine(config, spec, NO_TOKENIZER, self._tally, _never_opened, clock=self._timeline)
        self._result = Result(name, load.name, profile, [], notices=notices)
        predicts = _predicts(config, requests)
        parts = Parts(
            config,
            profile,
            lengths,
            [each.answer_token_ids for each in requests] if speculates else [],
            load.vocab_size,
            window,
            seed,
            self._tally,
            self._interpreter,
            self._beyond,
            looks_alike,
            predicts,
        )
        self._due: list[tuple[float, int]] = []
        """(time, replica), a heap: when replicas go on, and what has been overtaken since."""
        self._called: set[int] = set()
        """Replicas that may sleep although something has come to their inbox, or somebody waits."""
        self._replicas = [VirtualReplica(self, parts, index) for index in range(config.num_replicas)]
        self._result.num_blocks = self._replicas[0].engine.scheduler.blocks.pool.num_blocks
        self._open: dict[str, tuple[Outcome, Callable[[float], None]]] = {}
        """By id of a request: what becomes of it, and who is told of its end."""

    def run(self, gives_up: GivesUp = lambda outcomes, now: False) -> Result:
        """Plays the load to its end, or until somebody gives up.

        Raises:
            ContradictionError: A law of the scheduler is broken.
        """
        num_since_look = 0
        for stream in self._load.streams:
            self._begin(stream)
        try:
            while (replica := self._next()) is not None:
                num_since_look += replica.step()
                if num_since_look >= max(LOOK_EVERY, len(self._result.outcomes) // OUTCOMES_PER_STEP):
                    num_since_look = 0
                    self._interpreter.forget(self._earliest())
                    if gives_up(self._result.outcomes, replica.clock.now):
                        self._result.complete = False
                        return self._finish()
            self._check_end()
        except AssertionError as error:
            raise ContradictionError(f"seed {self._seed}: {error or 'blocks or places are not conserved'}") from error
        return self._finish()

    @property
    def master_s(self) -> float:
        """Seconds that the master's threads have computed until now."""
        return self._interpreter.taken_s

    def _next(self) -> VirtualReplica | None:
        """The replica that is farthest behind of those with something to do."""
        timeline, alone = self._timeline, self._replicas[0] if len(self._replicas) == 1 else None
        while True:
            replica = alone or self._first() or self._replicas[0]
            if (time := timeline.next) <= replica.wakes and time < math.inf:
                timeline.run_until(time)
                continue
            if replica.wakes == math.inf:
                return None
            return replica

    def _first(self, clock: EngineClock | None = None) -> VirtualReplica | None:
        """Of those with something to do the one that is farthest behind, of several the first; None: there are none.

        Left out is the one with this clock, while it steps: it tells in the end when it goes on.
        """
        due, replicas = self._due, self._replicas
        while due:
            time, index = due[0]
            replica = replicas[index]
            if replica.wakes == time and replica.clock is not clock:
                return replica
            heapq.heappop(due)
        return None

    def _earliest(self) -> float:
        """Before this nothing is done any more; replicas that sleep wake later."""
        first = self._replicas[0] if len(self._replicas) == 1 else self._first()
        return self._timeline.now if first is None else min(self._timeline.now, first.wakes)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _begin(self, stream: Stream) -> None:
        if stream.concurrency is None:
            for request in stream.requests:
                self._send(request, request.due_s, _nobody)
            return
        rest = iter(stream.requests)

        def ask(now: float) -> None:
            if (request := next(rest, None)) is not None:
                self._send(request, now, ask)

        for _ in range(stream.concurrency):
            ask(stream.requests[0].due_s if stream.requests else 0.0)

    def _send(self, request: Asked, time: float, done: Callable[[float], None]) -> None:
        request_class = class_of(request.priority_in(self._config.request_classes), self._config.request_classes)
        num_wanted = min(request.num_output_tokens, request.max_tokens)
        outcome = Outcome(
            request.stream, request_class, request.tenant, len(request.prompt_token_ids), num_wanted, time
        )
        self._result.outcomes.append(outcome)
        self._knock(request, outcome, time, done)

    def _knock(self, request: Asked, outcome: Outcome, time: float, done: Callable[[float], None]) -> None:
        """The request reaches the event loop, and when that has read it, the door."""

        def read() -> None:
            self._num_read += 1
            at = self._take_loop(self._profile.request_s)
            self._timeline.at(at, lambda: self._ask(request, outcome, done))

        self._timeline.at(time + self._profile.client_s, read)

    def _ask(self, request: Asked, outcome: Outcome, done: Callable[[float], None]) -> None:
        now, number = self._timeline.now, self._numbers[id(request)]
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
            if outcome.num_retries < self._load.retries and error.retry_after is not None:
                outcome.num_retries += 1
                self._knock(request, outcome, now + math.ceil(error.retry_after), done)  # as the header has it
                return
            self._end(outcome, now, "refused", str(error), done)
        except RequestError as error:
            self._result.num_unservable += 1
            self._result.unservable = self._result.unservable or str(error)
            self._end(outcome, now, "refused", str(error), done)
        else:
            self._open[stream.request_id] = outcome, done
            self._wake(None)

    def _end(self, outcome: Outcome, time: float, finish: str, error: str, done: Callable[[float], None]) -> None:
        outcome.end_s, outcome.finish, outcome.error = time + self._profile.client_s, finish, error
        done(outcome.end_s)

    def _take_loop(self, seconds: float) -> float:
        """Has the event loop work so long as soon as it can; returns when that is done."""
        self._loop_free_s = self._interpreter.take(max(self._loop_free_s, self._timeline.now), seconds)
        return self._loop_free_s

    def deliver(self, time: float, count: int, index: int) -> list[float] | None:
        """As `_deliver` at that time, unless something is to happen before, or replicas have times of their own."""
        if len(self._replicas) > 1 or self._timeline.next <= time:
            return None
        self._timeline.now = time
        return self._send_tokens(count, index)

    def _send_tokens(self, count: int, index: int) -> list[float]:
        """Has the event loop send pieces of a replica, one after the other; returns when each arrives."""
        self._num_sent[index] += count
        begins, client_s = max(self._loop_free_s, self._timeline.now), self._profile.client_s
        done = self._interpreter.take_each(begins, self._profile.token_s, count)
        self._loop_free_s = done[-1]
        return [each + client_s for each in done]

    def _deliver(self, pieces: Sequence[Told], publish: Publish, index: int) -> None:
        """On the event loop: pieces go to their clients, one after the other."""
        if told := [piece for piece in pieces if not isinstance(piece, CountedAnswer)]:
            publish(told)
        for piece, arrives in zip(pieces, self._send_tokens(len(pieces), index), strict=True):
            if isinstance(piece, CountedAnswer):
                piece.outcome.token_times_s.append(arrives)
                continue
            outcome, done = self._open[piece.request_id]
            outcome.token_times_s += [arrives] * len(piece.token_ids)
            outcome.num_cached_tokens = piece.num_cached_tokens
            if piece.finish_reason is not None:
                del self._open[piece.request_id]
                finish, error = piece.finish_reason.value, piece.error or ""
                at = arrives - self._profile.client_s
                self._timeline.at(arrives, functools.partial(self._end, outcome, at, finish, error, done))

    # --- what replicas need -----------------------------------------------------------------------------------------

    def drive(self, index: int, make: Callable[[Publish], Engine]) -> Engine:
        engine = self._master.replicas.drive(index, make, self._loop)
        engine.add_listener(_ReplicaWaker(lambda: self._loop.call_soon_threadsafe(self._wake, None)))
        return engine

    def _wake(self, _: None) -> None:
        """Whoever has something to do goes on."""
        called, self._called = self._called, set()
        for index in called:
            self._replicas[index].wake(self._timeline.now)

    def called(self, index: int) -> None:
        self._called.add(index)

    def outcome_of(self, request_id: str) -> Outcome:
        return self._open[request_id][0]

    def goes_on(self, time: float, index: int) -> None:
        if len(self._replicas) > 1 and time < math.inf:
            heapq.heappush(self._due, (time, index))

    def now_steps(self, clock: EngineClock) -> None:
        self._loop.clock = clock

    def beside(self, index: int) -> Beside:
        return Beside(self._num_sent[index], self._num_read / len(self._num_sent))

    def publish_at(self, time: float, pieces: Sequence[Told], publish: Publish, index: int) -> None:
        self._timeline.at(time, lambda: self._deliver(pieces, publish, index))

    def let_happen(self, time: float, clock: EngineClock) -> None:
        if len(self._replicas) > 1 and (other := self._first(clock)) is not None:
            time = min(time, other.wakes)
        self._timeline.run_until(time)
        self._loop.clock = clock

    # --- the end ----------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        assert not self._open, f"{len(self._open)} requests wait for ever"
        for replica in self._replicas:
            replica.check_end()

    def _finish(self) -> Result:
        result, replicas, tally = self._result, self._replicas, self._tally
        span = max((each.end_s for each in result.outcomes), default=0.0)
        result.num_steps = sum(each.engine.num_steps for each in replicas)
        result.num_tokens, result.block_use = tally.num_tokens, tally.block_use
        result.num_steps_beyond = self._beyond.num_steps
        result.notices += tuple(self._beyond.told(result.num_steps))
        spans = [part for each in replicas for part in each.agent.spans if part[0] < span]
        result.master_share = self._interpreter.taken_s / max(span, 1e-9)
        result.busy_share = min(1.0, sum(seconds for _, seconds in spans) / max(span * len(replicas), 1e-9))
        result.preemptions, result.bound_violations = tally.num_preempted, tally.num_violations
        result.num_draft_tokens, result.num_accepted = tally.num_draft_tokens, tally.num_accepted
        for replica in replicas:
            replica.engine.close()
        return result


def _simulated(config: ServingConfig) -> ServingConfig:
    """The configuration without what touches files, and without a model's own limits on what is asked.

    Replicas bring their own speculation controllers.
    """
    return replace(
        config,
        scheduler=replace(config.scheduler, record_path=None, speculative_method="none", draft_model_path=None),
        serving=replace(config.serving, explain_requests=0, request_log="none", batch_path=None),
        model=replace(config.model, model_path=None, end_token=None),
    )


def _window(config: ServingConfig) -> int | None:
    path = config.model.model_path
    return None if path is None else ModelSpec.from_folder(path).window


def _notices(config: ServingConfig, load: Load) -> Iterator[str]:
    """What of the configuration is not simulated."""
    method = config.scheduler.speculative_method
    if method != "none" and not load.has_texts:
        yield f"speculative_method {method} drafts nothing: no stream of the load has `recited`"
    if any(each.max_requests_per_minute or each.max_tokens_per_minute for each in config.api_keys):
        yield "what api_keys may ask for in a minute is not simulated: nobody is refused for that"
    if method == "draft_model":
        yield "draft_model_path is not simulated: drafts come from n-gram lookups"


def _check_classes(config: ServingConfig, load: Load) -> None:
    known = [each.name for each in config.request_classes]
    for stream in load.streams:
        for name in {each.class_name: None for each in stream.requests}:
            if name not in (None, *known):
                where = stream.class_where or f"{load.name}: `class` of the stream {stream.name}"
                rule = f"must be one of the configuration: {', '.join(sorted(known))}"
                raise ConfigError(f"{where} {rule}. Given: {name!r}")


def _predicts(config: ServingConfig, requests: list[Asked]) -> bool:
    """Whether anything is decided by when a first token is expected: refusals, deadlines, which replica gets whom."""
    refuses = config.scheduler.slo_refusal_factor is not None
    return refuses or config.num_replicas > 1 or any(each.timeout_s is not None for each in requests)


def _ends_after(request: Asked) -> int:
    """Tokens of an answer after which the model ends it, if nothing else does before."""
    least = request.num_output_tokens if request.num_output_tokens < request.max_tokens else request.max_tokens + 1
    return min(least, MOST_WHOLE)


def _never_opened(index: int, publish: Publish, on_progress: Callable[[str], None]) -> AbstractContextManager[Engine]:
    raise NotImplementedError("replicas of a simulation are driven by it")


def _nobody(now: float) -> None:
    """Nobody waits for the end of a request."""


class _ReplicaWaker(EngineListener):
    """Has the event loop wake the replicas whose inboxes got messages, once an engine may have sent some."""

    def __init__(self, wake: Callable[[], object]) -> None:
        self._wake = wake

    def on_departures(self, departures: list[Departure]) -> None:
        self._wake()

    def on_woken(self) -> None:
        self._wake()
