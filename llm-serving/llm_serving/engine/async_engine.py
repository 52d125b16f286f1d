"""The engine as the server sees it: submit a request, read a stream."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from llm_serving.admission.admission import (
    check_beam_search,
    check_priority,
    check_request,
    end_token_ids,
    stop_token_ids,
)
from llm_serving.admission.appointments import Visitor
from llm_serving.admission.door import Door, Forecast, Replica
from llm_serving.admission.waiting_room import WaitingRoom
from llm_serving.config.schema import ServingConfig
from llm_serving.core.beam_search_params import BeamSearchParams
from llm_serving.core.clock import Clock, monotonic
from llm_serving.core.exchange import Exchange
from llm_serving.core.generation_defaults import generation_defaults
from llm_serving.core.model_spec import ModelSpec
from llm_serving.core.request import Request
from llm_serving.core.request_class import class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.engine import Engine, Publish
from llm_serving.errors import (
    ContextLengthError,
    LLMServingError,
    NoWorkAgentsError,
    RequestNotFoundError,
    UnavailableError,
    WorkerDiedError,
)
from llm_serving.executor.supervised_executor import restart_delay_s
from llm_serving.log import get_logger
from llm_serving.observe.class_metrics import ClassLoad
from llm_serving.observe.explanation import Explanation, answers_to, explain
from llm_serving.observe.journal import Life
from llm_serving.observe.live_requests import LiveRequests
from llm_serving.observe.metrics import Metrics, ReplicaCounts
from llm_serving.observe.scheduler_state import SchedulerState
from llm_serving.observe.timeline import JsonObject, ReplicaTrace, trace
from llm_serving.text.tokenizer import Tokenizer

logger = get_logger(__name__)

STATE_TIMEOUT_S: Final = 5.0
"""How long a replica's state is waited for; one whose WorkAgent is started again answers later."""
NOBODY: Final = Visitor()
"""Who is not recognized when it comes again."""

T = TypeVar("T")

OpenReplica = Callable[[int, Publish, Callable[[str], None]], AbstractContextManager[Engine]]
"""(index, publish, on_progress) -> the replica's engine. Entering may take minutes; leaving ends its WorkAgent."""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    ready: bool
    """Whether at least one WorkAgent serves."""
    detail: str
    """For people: "ready", "WorkAgent 0: compiling the network", "no WorkAgent lives: ..."."""
    loading: bool = False
    """Whether a WorkAgent is still on its way, beside those that serve."""


@dataclass(frozen=True, slots=True)
class Admission:
    """What the door says to those it lets in."""

    forecast: Forecast | None = None
    """Of the first token of the last of them; None: too little has been measured."""
    of_one: bool = True
    """Whether it is for one request."""

    @property
    def predicted_s(self) -> float | None:
        return None if self.forecast is None else self.forecast.seconds


class RequestStream:
    """The pieces of one answer, in order. Close it early to abort the request."""

    def __init__(self, request_id: str, abort: Callable[[str], None], predicted_s: float | None = None) -> None:
        self.request_id = request_id
        self.predicted_s = predicted_s
        """Seconds from the door to the first token, as predicted there; None: too little had been measured."""
        self._abort = abort
        self._pieces: deque[RequestOutput] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Who waits for the next piece; there is one reader at most."""
        self._finished = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        while not self._pieces:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        piece = self._pieces.popleft()
        self._finished = piece.finished
        return piece

    async def aclose(self) -> None:
        if not self._finished:
            self._finished = True
            self._abort(self.request_id)

    def put(self, piece: RequestOutput) -> None:
        self._pieces.append(piece)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncEngine:
    """Joins the event loop with the engine threads, one for each WorkAgent.

    A request goes to the living replica with the fewest unfinished requests and stays there.
    """

    def __init__(
        self,
        config: ServingConfig,
        model_spec: ModelSpec,
        tokenizer: Tokenizer,
        metrics: Metrics,
        open_replica: OpenReplica,
        *,
        clock: Clock = monotonic,
    ) -> None:
        self.config = config
        self.model_spec = model_spec
        self.sampling_defaults: Mapping[str, Any] = (
            generation_defaults(config.model.model_path) if config.model.generation_config == "auto" else {}
        )
        """What OpenAI requests have that say nothing, by parameter; the rest is that of `SamplingParams`."""
        self.tokenizer = tokenizer
        self.metrics = metrics
        self._open_replica = open_replica
        self.clock = clock
        self._engines: dict[int, Engine] = {}
        self._failures: dict[int, str] = {}
        self._threads: list[threading.Thread] = []
        self._streams: dict[str, RequestStream] = {}
        self._owners: dict[str, Engine] = {}
        self._forecasts: dict[str, tuple[Forecast, float]] = {}
        """And when they were made: of requests that have no token yet."""
        self._live = LiveRequests()
        self._states_asked: dict[int, asyncio.Future[SchedulerState]] = {}
        """The newest question to each replica."""
        self._num_open: Counter[Engine] = Counter()
        """Requests each engine has been given and not ended; counted here, so that it is exact on the event loop."""
        self._room = WaitingRoom(config, clock)
        self._door = Door(config, self._room, metrics.classes, clock)
        metrics.classes.load = self._class_load
        metrics.replicas = self._replica_counts
        self._end_ids = end_token_ids(config.model, model_spec, tokenizer)
        self._counter = itertools.count()
        self._progress = "starting"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = threading.Event()
        self.failure: LLMServingError | None = None
        """Why this process cannot serve and shall end, once that is so."""
        self.on_failure: Callable[[], None] = lambda: None
        """Told on the event loop."""

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load every replica; call it on the event loop. `health` tells how far it is."""
        self._loop = asyncio.get_running_loop()
        for index in range(len(self.config.serving.agent_ports)):
            thread = threading.Thread(target=self._run_replica, args=(index,), name=f"engine-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    async def stop(self) -> None:
        """Ends every replica that serves; unfinished requests end with an error. One that still loads ends later."""
        self._stopping.set()
        for index, engine in list(self._engines.items()):
            if engine.dead is None:
                engine.stop()
                await asyncio.to_thread(self._threads[index].join)

    def health(self) -> EngineHealth:
        engines = dict(self._engines)
        failed = self._failures | {index: engine.dead for index, engine in engines.items() if engine.dead is not None}
        restarting = {
            index: engine.away or f"is started again: {engine.restarting}"
            for index, engine in engines.items()
            if engine.restarting is not None and engine.dead is None
        }
        used_up = any(engines[index].used_up for index in restarting)
        ready = any(engine.dead is None and engine.restarting is None for engine in engines.values())
        loading = bool(restarting) or len(engines.keys() | failed.keys()) < len(self.config.serving.agent_ports)
        notices = {index: engine.notice for index, engine in engines.items() if engine.notice}
        limit = self.config.serving.max_worker_restarts
        lasting = f"was started again more than {limit} times in a row without a step"
        notices |= {index: lasting for index, engine in engines.items() if engine.used_up}
        remarks = "; ".join(f"WorkAgent {index}: {remark}" for index, remark in sorted((notices | failed).items()))
        if not ready and not loading:
            return EngineHealth(False, f"no WorkAgent lives: {remarks}")
        if restarting and (ready or used_up):
            remarks = "; ".join(f"WorkAgent {index} {why}" for index, why in restarting.items())
            return EngineHealth(ready, remarks, loading)
        if loading:
            return EngineHealth(ready, self._progress, loading)
        return EngineHealth(ready, f"ready; {remarks}" if remarks else "ready")

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together: what the configuration allows and the cache can hold."""
        slots = [engine.scheduler.blocks.num_slots for engine in self._living().values()]
        return min([self.config.model.max_generate_length, *slots])

    @property
    def num_running(self) -> int:
        """Requests that have been scheduled and not ended, exact on the event loop."""
        return self._room.load().num_running

    @property
    def num_waiting(self) -> int:
        """Requests that have never been scheduled, exact on the event loop."""
        return self._room.load().num_waiting

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        exchange: Exchange | None = None,
        deadline: float | None = None,
        fork_of: RequestStream | None = None,
        beam_search: BeamSearchParams | None = None,
        visitor: Visitor = NOBODY,
        admission: Admission | None = None,
    ) -> RequestStream:
        """Submits one request; call it on the event loop. The stream ends after the piece with a `finish_reason`.

        With `fork_of`, a request with the same prompt, it runs on the same replica and shares the blocks of the prompt.
        It tells the same number of cached tokens: what the other one found, not what it takes from that.

        With `visitor` a refused request is recognized when it comes again. With `admission`, what `check_capacity` let
        in as a group, the door is not asked again.

        Raises:
            RequestError: The request can never be served: too long, a token id out of range, ...
            CapacityError: Too much waits, or the request would wait much longer than its class may, or beyond its
                deadline.
            UnavailableError: No WorkAgent is ready.
        """
        replica, engine = self._replica_of(fork_of) or self._least_loaded()
        request_class = class_of(priority, self.config.request_classes)
        try:
            check_request(
                prompt_token_ids,
                sampling,
                priority,
                self.model_spec.vocab_size,
                self.config.model,
                engine.scheduler.blocks,
                self._end_ids,
            )
        except ContextLengthError:
            self.metrics.classes.refused(request_class, "never_fits")
            raise
        num_tokens = len(prompt_token_ids)
        if admission is None:
            self._check_deadline(replica, engine, [num_tokens], priority, deadline)
            admission = self._check_capacity(replica, engine, [num_tokens], priority, tenant, visitor)
        static = self.config.model.batching_strategy == "static"
        if beam_search is not None:
            check_beam_search(self.config.model)
        request = Request(
            # A client may send the same id twice; inside, every request has its own.
            request_id=f"{request_id}-{next(self._counter)}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stop_token_ids=stop_token_ids(sampling, self._end_ids),
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            arrival_time=self.clock(),
            deadline=deadline,
            exchange=exchange,
            # A static batch takes no more members once it runs: a fork would come only after it.
            fork_of=None if fork_of is None or static else fork_of.request_id,
            beam_search=beam_search,
            predicted_ttft_s=admission.predicted_s,
        )
        stream = RequestStream(request.request_id, self._abort, admission.predicted_s)
        self._streams[request.request_id] = stream
        self._owners[request.request_id] = engine
        self._live.add(request)
        if admission.forecast is not None and admission.of_one and beam_search is None:
            self._forecasts[request.request_id] = admission.forecast, request.arrival_time
        self._num_open[engine] += 1
        self._room.enter(request.request_id, replica, request_class, tenant, num_tokens)
        try:
            engine.submit(request)
        except BaseException:
            self._forget(request.request_id)
            raise
        return stream

    def check_capacity(
        self,
        prompt_lens: Sequence[int],
        *,
        priority: int = 0,
        tenant: str = "",
        visitor: Visitor = NOBODY,
        deadline: float | None = None,
    ) -> Admission:
        """Checks that requests which belong together, with prompts of so many tokens, may come in now.

        The result is good for `generate` as long as the event loop does nothing in between.

        Raises:
            RequestError: They could not even if nothing waited.
            CapacityError: A limit on what waits has no room, or they would wait much longer than their class may.
            UnavailableError: No WorkAgent is ready.
        """
        replica, engine = self._least_loaded()
        self._check_deadline(replica, engine, prompt_lens, priority, deadline)
        return self._check_capacity(replica, engine, prompt_lens, priority, tenant, visitor)

    def knock(
        self,
        least_lens: Sequence[int],
        *,
        priority: int = 0,
        tenant: str = "",
        visitor: Visitor = NOBODY,
        deadline: float | None = None,
    ) -> None:
        """Refuses requests whose prompts have at least so many tokens, where that is enough to refuse them.

        Whoever is not refused has not come in yet.

        Raises:
            RequestError, CapacityError, UnavailableError: As `check_capacity` does.
        """
        replica, engine = self._least_loaded()
        self._check_deadline(replica, engine, least_lens, priority, deadline)
        self._door.knock(least_lens, priority, tenant, visitor, self._as_seen_from_the_door(replica, engine))

    def _check_deadline(
        self,
        replica: int,
        engine: Engine,
        prompt_lens: Sequence[int],
        priority: int,
        deadline: float | None,
    ) -> None:
        if deadline is not None:
            at = self._as_seen_from_the_door(replica, engine)
            self._door.check_deadline(prompt_lens, priority, deadline - self.clock(), at)

    def _check_capacity(
        self,
        replica: int,
        engine: Engine,
        prompt_lens: Sequence[int],
        priority: int,
        tenant: str,
        visitor: Visitor,
    ) -> Admission:
        at = self._as_seen_from_the_door(replica, engine)
        return Admission(self._door.check(prompt_lens, priority, tenant, visitor, at), len(prompt_lens) == 1)

    def seconds_to_first_token(self, num_prompt_tokens: int, *, priority: int = 0) -> float | None:
        """Until a request that came now would have its first token, as predicted; None: too little has been measured.

        Raises:
            UnavailableError: No WorkAgent is ready.
        """
        request_class = class_of(priority, self.config.request_classes)
        at = self._as_seen_from_the_door(*self._least_loaded())
        forecast = self._door.predict([num_prompt_tokens], request_class, at)
        return None if forecast is None else forecast.seconds

    def _as_seen_from_the_door(self, replica: int, engine: Engine) -> Replica:
        return Replica(
            replica,
            len(self._living()),
            engine.load.measured if engine.restarting is None else None,
            engine.scheduler.policy.honours_classes,
        )

    def cancel(self, request_id: str, tenant: str | None = None) -> list[str]:
        """Ends every request that a client means by this id; call it on the event loop.

        Each gets its last piece, with the finish reason `abort`, and its blocks are free, as soon as the engine has
        taken notice. One that is the client's and has ended, as far as that is remembered, is no error.

        Args:
            request_id: The client's, alone or as the id of an answer.
            tenant: Who asks and controls its own requests only; None: everybody's.

        Returns:
            Ids of the requests that end by this.

        Raises:
            RequestNotFoundError: Nobody knows of such a request, or it is another tenant's.
        """
        found = self._find(request_id, tenant)
        for request in found:
            self._owners[request.request_id].abort(request.request_id)
        return [request.request_id for request in found]

    async def reprioritise(self, request_id: str, priority: int, tenant: str | None = None) -> dict[str, bool]:
        """Gives every request that a client means by this id another priority; call it on the event loop.

        Args:
            request_id: The client's, alone or as the id of an answer.
            priority: The new one; that the caller may ask for it has been checked.
            tenant: Who asks and controls its own requests only; None: everybody's.

        Returns:
            Of each request that lives whether it has the priority now, see `Scheduler.reprioritise`.

        Raises:
            RequestError: No request can have such a priority.
            RequestNotFoundError: Nobody knows of such a request, or it is another tenant's.
            UnavailableError: A WorkAgent is started again, and the engine did not answer in time.
        """
        check_priority(priority)
        asked: dict[str, asyncio.Future[bool]] = {}
        for request in self._find(request_id, tenant):
            engine = self._owners[request.request_id]
            question = functools.partial(engine.reprioritise, request.request_id, priority)
            with contextlib.suppress(WorkerDiedError):
                asked[request.request_id] = asyncio.wrap_future(engine.ask(question))
        if asked:
            await asyncio.wait(asked.values(), timeout=STATE_TIMEOUT_S)
        if not all(answer.done() for answer in asked.values()):
            raise UnavailableError(f"the engine did not answer within {STATE_TIMEOUT_S:g} s; it may do so later")
        changed = {engine_id: answer.result() for engine_id, answer in asked.items()}
        request_class = class_of(priority, self.config.request_classes)
        for engine_id in (engine_id for engine_id, done in changed.items() if done):
            owner = self._owners.get(engine_id)
            replica = next((index for index, engine in self._engines.items() if engine is owner), None)
            if replica is not None:
                self._room.move(engine_id, replica, request_class)
        return changed

    async def scheduler_states(self) -> dict[int, SchedulerState | None]:
        """Every living replica's scheduler as it is between two steps; None: it did not answer in time.

        However many ask at once, each replica answers once.
        """
        for index, engine in self._living().items():
            asked = self._states_asked.get(index)
            if asked is None or asked.done():
                with contextlib.suppress(WorkerDiedError):
                    self._states_asked[index] = asyncio.wrap_future(engine.ask(engine.state))
        asked_now = {index: self._states_asked[index] for index in self._living() if index in self._states_asked}
        if asked_now:
            await asyncio.wait(asked_now.values(), timeout=STATE_TIMEOUT_S)
        return {index: answer.result() if answer.done() else None for index, answer in asked_now.items()}

    def explain(self, request_id: str, tenant: str | None = None) -> list[Explanation]:
        """Where the time of every request went that a client means by this id; call it from any thread.

        Args:
            request_id: The client's, alone or as the id of an answer.
            tenant: Who asks and sees its own requests only; None: everybody's.
        """
        found = []
        with_tenant = bool(self.config.api_keys)
        for index, engine in sorted(self._engines.items()):
            lives = self._lives(engine, request_id, tenant)
            if lives:
                record = engine.journal.record(self.clock())
                bounds = {each.name: each for each in engine.scheduler.bounds}
                found += [
                    explain(
                        life,
                        record,
                        bounds[life.request_class.name],
                        index,
                        with_tenant=with_tenant,
                        step_s=engine.mean_step_s,
                    )
                    for life in lives
                ]
        return found

    def timeline(self, num_steps: int, tenant: str | None = None) -> JsonObject:
        """A trace of the newest steps of each replica and of their requests, or of a tenant's part in both.

        Call it from any thread."""
        return trace(
            [
                ReplicaTrace(
                    index,
                    engine.journal.record(self.clock()),
                    [life for life in engine.journal.lives() if tenant in (None, life.tenant)],
                    own_steps_only=tenant is not None,
                )
                for index, engine in sorted(self._engines.items())
            ],
            num_steps,
        )

    def _find(self, request_id: str, tenant: str | None) -> list[Request]:
        """The requests that live and are meant by an id; none when all have ended.

        Raises:
            RequestNotFoundError: No request is known by it, or it is another tenant's.
        """
        found = self._live.find(request_id, tenant)
        if not found and not any(self._lives(engine, request_id, tenant) for engine in self._engines.values()):
            num_kept = self.config.serving.explain_requests
            rule = f"must be that of a request that lives or is among the newest {num_kept} that ended"
            raise RequestNotFoundError("request_id", f"{rule} (serving_config.explain_requests)", request_id)
        return found

    def _lives(self, engine: Engine, request_id: str, tenant: str | None) -> list[Life]:
        return [
            life for life in engine.journal.lives() if answers_to(life, request_id) and tenant in (None, life.tenant)
        ]

    def _least_loaded(self) -> tuple[int, Engine]:
        """The replica that gets the next request."""
        living = self._living()
        if not living:
            raise UnavailableError(self.health().detail)
        index, engine = min(living.items(), key=lambda item: (item[1].away is not None, self._num_open[item[1]]))
        away, now = engine.away, self.clock()
        if away is not None:
            wait_s = away.predicted_s(now)
            if wait_s is None or wait_s > self.config.serving.restart_wait_s:
                raise UnavailableError(f"WorkAgent {index} {away}", away.retry_after_s(now))
        return index, engine

    def _replica_of(self, stream: RequestStream | None) -> tuple[int, Engine] | None:
        """The living replica that has the request, as long as it has not ended."""
        owner = None if stream is None else self._owners.get(stream.request_id)
        return next((item for item in self._living().items() if item[1] is owner), None)

    def _class_load(self, name: str) -> ClassLoad:
        load = self._room.class_load(name)
        return ClassLoad(load.num_waiting, load.num_running)

    def _replica_counts(self) -> ReplicaCounts:
        ready = [engine for engine in self._living().values() if engine.restarting is None]
        return ReplicaCounts(len(self.config.serving.agent_ports), len(ready))

    def _abort(self, request_id: str) -> None:
        engine = self._owners.get(request_id)
        self._forget(request_id)
        if engine is not None:
            engine.abort(request_id)

    def _forget(self, request_id: str) -> None:
        self._room.leave(request_id)
        self._live.discard(request_id)
        self._streams.pop(request_id, None)
        self._forecasts.pop(request_id, None)
        engine = self._owners.pop(request_id, None)
        if engine is not None:
            self._num_open[engine] -= 1

    def _living(self) -> dict[int, Engine]:
        return {index: engine for index, engine in list(self._engines.items()) if engine.dead is None}

    # --- between the threads ----------------------------------------------------------------------------------------

    def _run_replica(self, index: int) -> None:
        """Body of an engine thread: load, serve, and again if that ends before the server does.

        A server none of whose replicas could be loaded has failed; they are not tried again.
        """
        for attempt in itertools.count(1):
            try:
                self._serve_replica(index)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other replicas go on and health tells
                self._failures[index] = str(error)
                logger.error("WorkAgent %d cannot serve: %s", index, error)
                if not self._engines and len(self._failures) == len(self.config.serving.agent_ports):
                    failure = error if isinstance(error, LLMServingError) else WorkerDiedError(str(error))
                    self._call_soon(self._fail, failure)
                    return
            if self._stopping.wait(restart_delay_s(attempt)):
                return

    def _serve_replica(self, index: int) -> None:
        with self._open_replica(index, self._publish, self._set_progress) as engine:
            engine.on_started = self._publish_started
            engine.on_away = self._publish_away
            self._engines[index] = engine
            self._failures.pop(index, None)
            if not self._stopping.is_set():
                logger.info("WorkAgent %d is ready", index)
                engine.run()

    def _set_progress(self, text: str) -> None:
        self._progress = text
        logger.info("%s", text)

    def _publish(self, pieces: list[RequestOutput]) -> None:
        """Called by engine threads, once a step."""
        self._call_soon(self._dispatch, pieces)

    def _publish_started(self, request_ids: list[str]) -> None:
        """Called by engine threads, when requests are scheduled for the first time."""
        self._call_soon(self._start_requests, request_ids)

    def _publish_away(self) -> None:
        """Called by engine threads, after an attempt to start a WorkAgent again."""
        self._call_soon(self._check_restarts, None)

    def _call_soon(self, callback: Callable[[T], None], argument: T) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(callback, argument)

    def _check_restarts(self, _: None) -> None:
        """Ends the server, if it shall end then, once every WorkAgent has used up its restarts."""
        if not self.config.serving.exit_without_work_agents:
            return
        if all(engine.used_up for engine in self._living().values()):
            self._fail(NoWorkAgentsError(self.health().detail))

    def _fail(self, error: LLMServingError) -> None:
        if self.failure is None:
            self.failure = error
            self.on_failure()

    def _start_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._room.start(request_id)

    def _dispatch(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            stream = self._streams.get(piece.request_id)
            if stream is None:
                continue
            if piece.request_id in self._forecasts:
                self._learn(piece)
            if piece.finished:
                self._forget(piece.request_id)
            stream.put(piece)

    def _learn(self, first: RequestOutput) -> None:
        """The first piece of an answer has come: the door may learn from what it predicted."""
        forecast, began = self._forecasts.pop(first.request_id)
        if first.token_ids:
            self._door.learn(forecast, self.clock() - began)
