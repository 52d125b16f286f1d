"""The engine as the server sees it: submit a request, read a stream."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from llm_serving.admission.admission_control import AdmissionControl, RefusedRequests
from llm_serving.admission.queue_limits import AdmissionQueue
from llm_serving.admission.validation import check_beam_search, check_request, end_token_ids, stop_token_ids
from llm_serving.config.schema import ServingConfig
from llm_serving.core.constraint import Constraint
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.generation_defaults import generation_defaults
from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import ANONYMOUS, Caller, class_of
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.coalescing import CoalescedResponse, CoalescedResponses, Sharing
from llm_serving.engine.control import Control
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.migration import MigratingRequest, failure_output
from llm_serving.engine.fleet.reload import ConfigReloader
from llm_serving.engine.fleet.router import Route, Router
from llm_serving.engine.open_requests import OpenRequest, OpenRequests
from llm_serving.engine.replicas import EngineHealth, Events, OpenReplica, Replicas
from llm_serving.engine.request_lookup import RequestLookup
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import (
    ContextLengthError,
    LLMServingError,
    RequestError,
    UnavailableError,
    WorkerDiedError,
)
from llm_serving.log import get_logger
from llm_serving.models.pooling import Pooling, resolve_pooling
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.class_metrics import ClassLoad
from llm_serving.observability.metrics import Metrics
from llm_serving.text.structured_output import ConstraintCompiler, GrammarLimits
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

ID_BYTES: Final = 8
"""Random bytes at the end of an engine's id, so that it cannot be predicted."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A group of requests that passed admission control."""

    predicted_s: float | None = None
    """Predicted seconds from its arrival at the server to the first token of its last request."""


class AsyncEngine:
    """Joins the event loop with the engine threads, one for each WorkAgent.

    The router says which replica gets a request; there it stays.
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
        path, mode = config.model.model_path, config.model.pooling
        self.pooling: Pooling | None = None if path is None else resolve_pooling(mode, path)
        """How texts become vectors; None: they do not."""
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.clock = clock
        self._requests = OpenRequests()
        events = Events(
            self._dispatch, self._start_requests, self._hand_over, self._fail, self._end_rest, self._look_after
        )
        self.replicas = Replicas(config, open_replica, events)
        self._queue = AdmissionQueue(config, clock)
        self._admission = AdmissionControl(config, self._queue, metrics.classes, clock)
        self._router = Router(config, self.replicas, self._requests, self._queue, self._admission, clock)
        self.shared = CoalescedResponses(
            config.serving.coalesced_response_bytes, config.serving.request_log_age_s, clock
        )
        """Answers that are given to all who ask for the same."""
        metrics.classes.load = self._class_load
        metrics.classes.predicted_s = self._class_wait
        metrics.replicas = self.replicas.counts
        self.lookup = RequestLookup(config, self.replicas, self._requests, clock)
        self.control = Control(config, self.lookup, self.replicas, self._queue, self._requests)
        self.reloading = ConfigReloader(config, self.replicas, metrics)
        self.reloading.followers.append(self._follow)
        self.end_token_ids = end_token_ids(config.model, model_spec, tokenizer)
        """By which the model ends a text."""
        serving = config.serving
        self.constraints = ConstraintCompiler(
            tokenizer,
            self.end_token_ids,
            model_spec.vocab_size,
            GrammarLimits(serving.max_grammar_bytes, serving.max_grammar_states, serving.grammar_cache_size),
        )
        """Makes what answers must keep to of what requests say of their form."""
        self.failure: LLMServingError | None = None
        """Why this process cannot serve and shall end, once that is so."""
        self.on_failure: Callable[[], None] = lambda: None
        """Told on the event loop."""

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to load every replica; call it on the event loop. `health` tells how far it is."""
        self.replicas.start()

    async def stop(self) -> None:
        """Ends every replica that serves; unfinished requests end with an error. One that still loads ends later."""
        await self.replicas.stop()

    def health(self) -> EngineHealth:
        return self.replicas.health()

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together: what the configuration allows and the cache can hold."""
        longest = self.config.model.max_generate_length
        for engine in list(self.replicas.engines.values()):
            if engine.dead is None:
                longest = min(longest, engine.scheduler.blocks.max_request_tokens)
        return longest

    @property
    def compute_fingerprint(self) -> ComputeFingerprint:
        """By what answers are computed; the same at every replica, as all are of this machine.

        Raises:
            UnavailableError: No WorkAgent has loaded its model.
        """
        living = self.replicas.living()
        if not living:
            raise UnavailableError(self.health().detail)
        return next(iter(living.values())).compute_fingerprint

    @property
    def num_running(self) -> int:
        """Requests that have been scheduled and not ended, exact on the event loop."""
        return self._queue.load().num_running

    @property
    def num_waiting(self) -> int:
        """Requests that have never been scheduled, exact on the event loop."""
        return self._queue.load().num_waiting

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        caller: Caller = ANONYMOUS,
        *,
        request_id: str,
        fork_of: RequestStream | None = None,
        beam_search: BeamSearchParams | None = None,
        constraint: Constraint | None = None,
        wants_vector: bool = False,
        has_siblings: bool = False,
        admission: Admission | None = None,
        sharing: Sharing | None = None,
    ) -> RequestStream:
        """Submits one request; call it on the event loop. The stream ends after the piece with a `finish_reason`.

        With `fork_of`, a request with the same prompt, it runs on the same replica and shares the blocks of the prompt.
        It tells the same number of cached tokens: what the other one found, not what it takes from that.

        With `constraint`, what has been compiled of the one that its sampling names.

        With `has_siblings`, others are forked of it: it ends at the replica where it begins.

        With `wants_vector` its last piece has the last hidden state of the prompt.

        With `admission`, the result of `check_capacity` for its group, the request is not checked again.

        With `sharing` it is not computed where the same answer is there or on its way; its stream begins with all that
        there is of it, and closing it, or its deadline, ends nothing that others read.

        Raises:
            RequestError: The request can never be served: too long, a token id out of range, ...
            CapacityError: Too much waits, or the request would wait much longer than its class may, or beyond its
                deadline.
            UnavailableError: No WorkAgent is ready.
        """
        if self.pooling is not None and self.pooling.embedding_only and not wants_vector:
            raise RequestError("model", "is an embedding model: it answers /v1/embeddings, /v1/score and /rerank")
        if sharing is not None and (found := self.shared.find(sharing.key)) is not None:
            return self._join(found, request_id, caller)
        self._check_request(prompt_token_ids, sampling, caller)
        num_tokens = len(prompt_token_ids)
        hashes = self._router.block_hashes(prompt_token_ids, sampling, caller)
        route = None if fork_of is None else self._router.route_of(fork_of)
        if route is None:
            route = self._router.route([num_tokens], caller, hashes)
        if admission is None:
            admission = self._admit(route, [num_tokens], caller)
        if beam_search is not None:
            check_beam_search(self.config.model, sampling)
        static = self.config.model.batching_strategy == "static"
        request = Request(
            # A client may send the same id twice; inside, every request has its own, which tells nothing of the others.
            request_id=f"{request_id}-{secrets.token_hex(ID_BYTES)}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stop_token_ids=stop_token_ids(sampling, self.end_token_ids),
            priority=caller.priority,
            tenant=caller.tenant,
            cache_salt=caller.cache_salt,
            arrival_time=self.clock(),
            deadline=caller.deadline,
            http_timings=caller.http_timings,
            # A static batch takes no more members once it runs: a fork would come only after it.
            fork_of=None if fork_of is None or static else fork_of.request_id,
            beam_search=beam_search,
            constraint=constraint,
            wants_vector=wants_vector,
        )
        is_alone = not (has_siblings or fork_of is not None or beam_search is not None)
        request.wants_migration = (
            route.replica in self._router.prefill_replicas and is_alone and not request.has_prompt_results
        )
        stream = self._open(request, request_id, route, caller, admission, sharing)
        self._router.record_submitted(request.request_id, route, hashes)
        self._submit(request, route, caller)
        return stream

    def _check_request(self, prompt_token_ids: list[int], sampling: SamplingParams, caller: Caller) -> None:
        """Raises RequestError where the request can never be served."""
        try:
            check_request(
                prompt_token_ids,
                sampling,
                caller.priority,
                self.model_spec.vocab_size,
                self.config.model,
                self._router.smallest_cache(),
                self.end_token_ids,
            )
        except ContextLengthError:
            self.metrics.classes.refused(class_of(caller.priority, self.config.request_classes), "never_fits")
            raise

    def _open(
        self,
        request: Request,
        client_id: str,
        route: Route,
        caller: Caller,
        admission: Admission,
        sharing: Sharing | None,
    ) -> RequestStream:
        """The stream by which a request that was let in is read, by others too where its answer is shared."""
        if (http_timings := caller.http_timings) is not None:
            http_timings.predicted_ttft_s = admission.predicted_s
            if http_timings.arrival_time is None:
                http_timings.arrival_time = request.arrival_time
        if sharing is None:
            stream = RequestStream(request.request_id, self._abort, admission.predicted_s)
            self._requests.add(OpenRequest(request, stream, route.engine, request.deadline))
            return stream
        shared = self.shared.open(sharing, request.request_id, self._abort, self._put_off)
        stream = shared.read(client_id, http_timings, admission.predicted_s, caller.deadline)
        self._requests.add(OpenRequest(request, shared, route.engine, request.deadline))
        return stream

    def _submit(self, request: Request, route: Route, caller: Caller) -> None:
        """Raises UnavailableError where the engine has ended since it was chosen."""
        self._queue.add(
            request.request_id,
            route.replica,
            class_of(caller.priority, self.config.request_classes),
            caller.tenant,
            request.num_prompt_tokens,
            route.num_cached_tokens,
        )
        try:
            route.engine.submit(request)
        except WorkerDiedError as error:
            self._forget_shared(self._forget(request.request_id))
            raise UnavailableError(str(error)) from error

    def _join(self, shared: CoalescedResponse, client_id: str, caller: Caller) -> RequestStream:
        self.metrics.shared()
        self._requests.record_coalesced(client_id, shared.request_id)
        opened = self._requests.get(shared.request_id)
        if opened is not None and opened.request.http_timings is not None:
            opened.request.http_timings.num_coalesced += 1
        return shared.read(client_id, caller.http_timings, deadline=caller.deadline)

    def check_capacity(self, prompt_lens: Sequence[int], caller: Caller = ANONYMOUS, num_each: int = 1) -> Admission:
        """Check a group of requests, with prompts of so many tokens, against all admission limits.

        `num_each` requests in a row share a prompt, which is computed once unless they form a static batch.

        The result is valid for `generate` as long as the event loop runs nothing else in between.

        Raises:
            RequestError: The group exceeds a limit even when no other request waits.
            CapacityError: The group exceeds a limit now, or its first token would come too late.
            UnavailableError: No WorkAgent is ready.
        """
        is_static = self.config.model.batching_strategy == "static"
        uncached = [1 if each % num_each and not is_static else count for each, count in enumerate(prompt_lens)]
        return self._admit(self._router.route(prompt_lens, caller), prompt_lens, caller, uncached)

    def precheck_capacity(self, min_lens: Sequence[int], caller: Caller = ANONYMOUS) -> None:
        """Refuse a group of requests before their texts are tokenized, if the least prompt lengths are enough for that.

        A group that is not refused must still pass `check_capacity`.

        Raises:
            RequestError, CapacityError, UnavailableError: As in `check_capacity`.
        """
        self._check(self._router.route(min_lens, caller), min_lens, caller, self._admission.min_uncached(min_lens))

    def _admit(
        self, route: Route, prompt_lens: Sequence[int], caller: Caller, uncached_lens: Sequence[int] | None = None
    ) -> Admission:
        predicted_s = self._check(route, prompt_lens, caller, uncached_lens or prompt_lens)
        received = None if caller.http_timings is None else caller.http_timings.received_time
        if predicted_s is not None and received is not None:
            predicted_s += max(0.0, self.clock() - received)
        return Admission(predicted_s)

    def _check(
        self, route: Route, prompt_lens: Sequence[int], caller: Caller, uncached_lens: Sequence[int]
    ) -> float | None:
        """Return the predicted seconds to the first token, or raise CapacityError."""
        replica = self._router.load_of(route)
        if caller.deadline is not None:
            self._admission.check_deadline(uncached_lens, caller, replica)
        return self._admission.check(prompt_lens, caller, replica, uncached_lens)

    def seconds_to_first_token(self, num_prompt_tokens: int, *, priority: int = 0, tenant: str = "") -> float | None:
        """Until a request that came now would have its first token, as predicted; None: too little has been measured.

        Raises:
            UnavailableError: No WorkAgent is ready.
        """
        request_class = class_of(priority, self.config.request_classes)
        route = self._router.route([num_prompt_tokens], Caller(priority=priority, tenant=tenant))
        replica = self._router.load_of(route)
        return self._admission.predict_s([num_prompt_tokens], request_class, tenant, replica)

    def refused_since(self, time: float) -> list[RefusedRequests]:
        """Return the requests that admission control refused since an engine time; call it on the event loop."""
        return self._admission.refused_since(time)

    def _class_load(self, name: str) -> ClassLoad:
        load = self._queue.class_load(name)
        return ClassLoad(load.num_waiting, load.num_running)

    def _class_wait(self, name: str) -> float | None:
        request_class = next(each for each in self.config.request_classes if each.name == name)
        try:
            return self.seconds_to_first_token(1, priority=request_class.rank)
        except UnavailableError:
            return None

    def _abort(self, request_id: str) -> None:
        """Its place is its tenant's still, also between two replicas, until the one that has it lets go of it."""
        opened = self._forget(request_id)
        self._forget_shared(opened)
        if opened is not None:
            opened.engine.abort(request_id)

    def _put_off(self, request_id: str, deadline: float | None) -> None:
        opened = self._requests.get(request_id)
        if opened is not None:
            opened.deadline = deadline
            with contextlib.suppress(WorkerDiedError):  # then it has ended with everything else
                opened.engine.ask(partial(opened.engine.put_off, request_id, deadline))

    def _forget(self, request_id: str) -> OpenRequest | None:
        self._queue.remove(request_id)
        self._router.record_finished(request_id)
        opened = self._requests.pop(request_id)
        if opened is not None and self.replicas.drained:
            self.control.ended_at(opened.engine)
        return opened

    def _forget_shared(self, opened: OpenRequest | None) -> None:
        """Nobody else gets an answer that is not computed to its end."""
        if opened is not None and isinstance(opened.stream, CoalescedResponse):
            self.shared.forget(opened.stream)

    def _follow(self, config: ServingConfig) -> None:
        """From now on another configuration counts at the door."""
        self.config = config
        for each in (self._queue, self._admission, self._router):
            each.reload(config)
        self.metrics.classes.reload(config.request_classes)

    # --- what the replicas tell -------------------------------------------------------------------------------------

    def _fail(self, error: LLMServingError) -> None:
        if self.failure is None:
            self.failure = error
            self.on_failure()

    def _look_after(self, engine: Engine) -> None:
        """It was drained while it was loaded: it leaves, unless it has been given something."""
        self.control.ended_at(engine)

    def _hand_over(self, requests: list[MigratingRequest]) -> None:
        """Gives requests whose prompts have been computed to replicas that decode."""
        for migrating in requests:
            try:
                self._hand_one_over(migrating)
            except Exception as error:  # whoever meets a fault of ours is alone with it
                logger.exception("request %s does not go on", migrating.request.request_id)
                self._let_go(migrating, error)

    def _hand_one_over(self, migrating: MigratingRequest) -> None:
        request = migrating.request
        opened = self._requests.get(request.request_id)
        is_cancelled = opened is None or opened.is_cancelled
        if opened is not None:
            request.deadline = opened.deadline
            if opened.priority is not None:
                request.priority = opened.priority
        transferred = migrating.transferred
        for best, at_best in self._router.migration_targets(None if transferred is None else transferred.replica):
            if not at_best.scheduler.blocks.can_ever_fit(request.max_num_tokens):
                continue  # caches may differ in size; the one it comes from has room for it
            replica = best if is_cancelled else self.replicas.transfer(migrating, best)
            if replica is None:
                self._requests.start_transfer(request.request_id, at_best)
                return
            engine = self.replicas.engines[replica]
            with contextlib.suppress(WorkerDiedError):
                # In one message: the steps between two could finish it.
                engine.take_over(migrating, is_cancelled=is_cancelled)
                if opened is not None:  # its client is there
                    before = opened.engine
                    self._requests.finish_migration(request.request_id, request, engine)
                    self._queue.change_replica(request.request_id, replica)
                    self._router.record_migrated(request.request_id, replica)
                    self.control.ended_at(before)
                return
        self._end(request, FinishReason.UNAVAILABLE, "no WorkAgent is left that could go on with it")

    def _let_go(self, migrating: MigratingRequest, error: Exception) -> None:
        """Nobody goes on with it, unless that one has it already, who is told to end it."""
        request_id = migrating.request.request_id
        opened = self._requests.get(request_id)
        is_nobodys = opened is None or opened.request is not migrating.request
        if opened is not None:
            self._break_off(opened, error)
        if is_nobodys:
            self.replicas.accounting.tenant_slots.end_migration(request_id)
            with contextlib.suppress(Exception):  # it may be what could not be handed over
                self.replicas.reclaim_blocks(migrating.drop_blocks())

    def _end_rest(self, engine: Engine) -> None:
        """Ends what an engine has not: one that ends by a fault of ours may never have known who met it."""
        for opened in self._requests.of_engine(engine):
            self._end(opened.request, FinishReason.ERROR, f"its engine has ended: {engine.dead}")

    def _end(self, request: Request, reason: FinishReason, error: str) -> None:
        opened = self._forget(request.request_id)
        self.replicas.accounting.tenant_slots.end_migration(request.request_id)
        if opened is not None:
            opened.stream.put(failure_output(request, reason, error))

    def _start_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._queue.start(request_id)

    def _dispatch(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            opened = self._requests.get(piece.request_id)
            if opened is None:
                continue
            try:
                self._pass_on(opened, piece)
            except Exception as error:  # whoever meets a fault of ours is alone with it
                logger.exception("request %s is not told what came of it", piece.request_id)
                self._break_off(opened, error)

    def _pass_on(self, opened: OpenRequest, piece: RequestOutput) -> None:
        if piece.finished:
            self._forget(piece.request_id)
            if piece.request_id in (slots := self.replicas.accounting.tenant_slots).migrating:
                slots.end_migration(piece.request_id)
        opened.stream.put(piece)

    def _break_off(self, opened: OpenRequest, error: Exception) -> None:
        """Ends it as far as that can be done; its client is told whatever else fails."""
        request_id = opened.request.request_id
        piece = failure_output(opened.request, FinishReason.ERROR, f"internal error: {error}")
        for forget in (
            partial(opened.engine.abort, request_id),
            partial(self._forget, request_id),
            partial(self._forget_shared, opened),
            partial(opened.stream.put, piece),
        ):
            with contextlib.suppress(Exception):
                forget()
