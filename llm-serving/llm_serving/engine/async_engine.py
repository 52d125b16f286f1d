"""The server's interface to the engines: it accepts requests and returns a stream of outputs for each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from llm_serving.admission.admission_control import RefusedRequests
from llm_serving.admission.validation import check_beam_search, check_request, end_token_ids, stop_token_ids
from llm_serving.config.schema import ServingConfig
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.request import Constraint, Request
from llm_serving.core.request_class import ANONYMOUS, Caller, class_of
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams, generation_defaults
from llm_serving.core.timings import Clock, monotonic
from llm_serving.engine.adapters import AdapterRegistry
from llm_serving.engine.control import Control, RequestLookup
from llm_serving.engine.engine import Engine
from llm_serving.engine.fleet.router import Route
from llm_serving.engine.lifecycle import ConfigReloader, Lifecycle
from llm_serving.engine.open_requests import OpenRequest
from llm_serving.engine.replicas import EngineHealth, OpenReplica
from llm_serving.engine.request_dispatcher import RequestDispatcher
from llm_serving.engine.request_stream import CoalescedResponse, RequestStream, Sharing
from llm_serving.errors import (
    ContextLengthError,
    LLMServingError,
    ModelNotFoundError,
    RequestError,
    UnavailableError,
    WorkerDiedError,
)
from llm_serving.models.pooling import Pooling, resolve_pooling
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.component_metrics import ClassLoad
from llm_serving.observability.metrics import Metrics
from llm_serving.text.structured_output import ConstraintCompiler, GrammarLimits
from llm_serving.text.tokenizer.tokenizer import Tokenizer

ID_BYTES: Final = 8
"""Random bytes at the end of a request id, so that no client can predict the ids of others."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Proof that a group of requests passed admission control, for `AsyncEngine.generate`."""

    predicted_s: float | None = None
    """Predicted seconds from arrival to the first token of the group's last request."""


class AsyncEngine:
    """Checks requests and submits them to the engine threads of all replicas. Only the event loop may call it."""

    def __init__(
        self,
        config: ServingConfig,
        model_spec: ModelSpec,
        tokenizer: Tokenizer,
        metrics: Metrics,
        open_replica: OpenReplica,
        *,
        clock: Clock = monotonic,
        set_weights: Callable[[Path], None] | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`set_weights` sets the folder from which WorkAgents load weights. Without it, weights cannot be replaced."""
        self.config = config
        self.adapters = AdapterRegistry(config, model_spec) if adapters is None else adapters
        self.model_spec = model_spec
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.clock = clock
        path, serving = config.model.model_path, config.serving
        self.sampling_defaults: Mapping[str, Any] = (
            generation_defaults(path) if config.model.generation_config == "auto" else {}
        )
        """Sampling parameters that the model recommends. They are the defaults of OpenAI requests only."""
        self.pooling: Pooling | None = None if path is None else resolve_pooling(config.model.pooling, path, model_spec)
        """How hidden states become embeddings, or None if the model does not produce embeddings."""
        self._num_input_ids = model_spec.vocab_size if path is None else model_spec.network.num_input_ids
        self._dispatcher = dispatcher = RequestDispatcher(config, metrics, open_replica, clock, self._fail)
        self.replicas, self.coalesced = dispatcher.replicas, dispatcher.coalesced
        self._requests, self._queue = dispatcher.requests, dispatcher.queue
        self._admission, self._router = dispatcher.admission, dispatcher.router
        metrics.classes.load = self._class_load
        metrics.classes.predicted_s = self._class_wait
        metrics.replicas = self.replicas.counts
        self.lookup = RequestLookup(config, self.replicas, self._requests, clock)
        self.control = Control(config, self.lookup, dispatcher)
        dispatcher.on_adapter_error = partial(self.control.check_adapter, self.adapters)
        self.lifecycle = Lifecycle(config, dispatcher, set_weights)
        self.reloading = ConfigReloader(config, self.replicas, metrics)
        self.reloading.followers.append(self._follow)
        self.end_token_ids = end_token_ids(config.model, model_spec, tokenizer)
        self.constraints = ConstraintCompiler(
            tokenizer,
            self.end_token_ids,
            model_spec.vocab_size,
            GrammarLimits(serving.max_grammar_bytes, serving.max_grammar_states, serving.grammar_cache_size),
        )
        self.failure: LLMServingError | None = None
        """Error because of which this process cannot serve and must exit."""
        self.on_failure: Callable[[], None] = lambda: None

    def share_tenants(self, other: AsyncEngine) -> None:
        """Apply each tenant's `max_waiting` to the requests of this model and `other` together. Call before `start`."""
        self._queue.share_tenants(other._queue)

    def start(self) -> None:
        self.replicas.start()

    async def stop(self) -> None:
        await self.replicas.stop()

    def health(self) -> EngineHealth:
        return self.lifecycle.health or self.replicas.health()

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request. A small KV cache may reduce the configured number."""
        longest = self.config.model.max_generate_length
        for engine in list(self.replicas.engines.values()):
            if engine.dead is None:
                longest = min(longest, engine.scheduler.blocks.max_request_tokens)
        return longest

    @property
    def compute_fingerprint(self) -> ComputeFingerprint:
        """Fingerprint of the compute stack, equal on all replicas. Raise UnavailableError if no replica is loaded."""
        living = self.replicas.living()
        if not living:
            raise UnavailableError(self.health().detail)
        return next(iter(living.values())).compute_fingerprint

    @property
    def num_running(self) -> int:
        return self._queue.load().num_running

    @property
    def num_waiting(self) -> int:
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
        """Submit a request. Return its stream, whose last output has a `finish_reason`.

        Args:
            request_id: The client's id of the request. Several requests may have the same id.
            fork_of: Stream of a request with the same prompt. Both share KV blocks, unless batching is static.
            wants_vector: Whether the last output must include the hidden state of the last prompt token.
            has_siblings: Whether other requests fork from this one. They share its blocks, so it never migrates.
            admission: Result of `check_capacity` for the request's group. If None, the request is checked alone.
            sharing: Key by which identical requests get the same answer. If it is None, the answer is not shared.

        Raises:
            RequestError: The request can never be served: for example, it is too long, or its adapter was unloaded.
            CapacityError: A queue limit is exceeded, or the first token would come too late.
            UnavailableError: No WorkAgent is ready.
        """
        if self.lifecycle.gate is not None:
            raise UnavailableError(f"the request was not started: {self.lifecycle.gate.reason}. Send the request again")
        if caller.adapter and not self.adapters.is_offered(caller.adapter):
            raise ModelNotFoundError(
                "model", "must be a loaded adapter: this one was unloaded since the request arrived"
            )
        if self.pooling is not None and self.pooling.embedding_only and not wants_vector:
            raise RequestError("model", self.pooling.refusal)
        if sharing is not None and (found := self.coalesced.find(sharing.key)) is not None:
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
            # Clients may send the same id twice. The random part is unique, and reveals nothing about other requests.
            request_id=f"{request_id}-{secrets.token_hex(ID_BYTES)}",
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            stop_token_ids=stop_token_ids(sampling, self.end_token_ids),
            priority=caller.priority,
            tenant=caller.tenant,
            cache_salt=caller.cache_salt,
            adapter=caller.adapter,
            arrival_time=self.clock(),
            deadline=caller.deadline,
            http_timings=caller.http_timings,
            # A static batch admits no request after its first step, so a fork would run only after the batch.
            fork_of=None if fork_of is None or static else fork_of.request_id,
            beam_search=beam_search,
            constraint=constraint,
            wants_vector=wants_vector,
        )
        is_alone = not (has_siblings or fork_of is not None or beam_search is not None)
        request.wants_migration = (
            route.replica in self._router.prefill_replicas and is_alone and not request.has_prompt_results
        )
        stream = self._open(request, request_id, route.engine, admission.predicted_s, sharing)
        if hashes:
            self._router.prompts.add(request.request_id, route.replica, hashes)
        self._router.latest = route.replica
        self._queue.add(
            request.request_id,
            route.replica,
            class_of(caller.priority, self.config.request_classes),
            caller.tenant,
            num_tokens,
            route.num_cached_tokens,
        )
        try:
            route.engine.submit(request)
        except WorkerDiedError as error:  # the engine has ended since it was chosen
            if (opened := self._dispatcher.close(request.request_id)) is not None:
                self._dispatcher.discard_coalesced(opened)
            raise UnavailableError(str(error)) from error
        return stream

    def _check_request(self, prompt_token_ids: list[int], sampling: SamplingParams, caller: Caller) -> None:
        blocks, num_ids = self._router.smallest_cache(), self._num_input_ids
        try:
            check_request(prompt_token_ids, sampling, num_ids, self.config.model, blocks, self.end_token_ids)
        except ContextLengthError:
            self.metrics.classes.refused(class_of(caller.priority, self.config.request_classes), "never_fits")
            raise

    def _open(
        self, request: Request, client_id: str, engine: Engine, predicted_s: float | None, sharing: Sharing | None
    ) -> RequestStream:
        if (http_timings := request.http_timings) is not None:
            http_timings.predicted_ttft_s = predicted_s
            if http_timings.arrival_time is None:
                http_timings.arrival_time = request.arrival_time
        dispatcher = self._dispatcher
        source: RequestStream | CoalescedResponse
        if sharing is None:
            source = stream = RequestStream(request.request_id, dispatcher.abort, predicted_s)
        else:
            source = self.coalesced.open(sharing, request.request_id, dispatcher.abort, dispatcher.extend_deadline)
            stream = source.read(client_id, http_timings, predicted_s, request.deadline)
        self._requests.add(OpenRequest(request, source, engine, request.deadline))
        return stream

    def _join(self, shared: CoalescedResponse, client_id: str, caller: Caller) -> RequestStream:
        self.metrics.add(shared_answers=1)
        self._requests.record_coalesced(client_id, shared.request_id)
        opened = self._requests.by_id.get(shared.request_id)
        if opened is not None and opened.request.http_timings is not None:
            opened.request.http_timings.num_coalesced += 1
        return shared.read(client_id, caller.http_timings, deadline=caller.deadline)

    def check_capacity(self, prompt_lens: Sequence[int], caller: Caller = ANONYMOUS, num_each: int = 1) -> Admission:
        """Check a group of requests against all admission limits. `prompt_lens`: prompt length of each request. Each
        `num_each` consecutive requests share a prompt. Pass the result to `generate` before the event loop runs another
        task, which could use the capacity. Raise RequestError if the group would exceed a limit even in an empty queue,
        CapacityError if it exceeds a limit now or its first token would come too late, and UnavailableError if no
        WorkAgent is ready.
        """
        is_static = self.config.model.batching_strategy == "static"
        uncached = [1 if each % num_each and not is_static else count for each, count in enumerate(prompt_lens)]
        return self._admit(self._router.route(prompt_lens, caller), prompt_lens, caller, uncached)

    def precheck_capacity(self, min_lens: Sequence[int], caller: Caller = ANONYMOUS) -> None:
        """Raise the errors of `check_capacity` for prompts of at least these lengths, before tokenization."""
        replica = self._router.load_of(self._router.route(min_lens, caller))
        self._admission.check(min_lens, caller, replica, self._admission.min_uncached(min_lens))

    def _admit(
        self, route: Route, prompt_lens: Sequence[int], caller: Caller, uncached_lens: Sequence[int] | None = None
    ) -> Admission:
        predicted_s = self._admission.check(prompt_lens, caller, self._router.load_of(route), uncached_lens)
        received = None if caller.http_timings is None else caller.http_timings.received_time
        if predicted_s is not None and received is not None:
            predicted_s += max(0.0, self.clock() - received)
        return Admission(predicted_s)

    def seconds_to_first_token(self, num_prompt_tokens: int, *, priority: int = 0, tenant: str = "") -> float | None:
        """Predict the seconds to the first token of a new request. Return None if too few steps were measured."""
        request_class = class_of(priority, self.config.request_classes)
        route = self._router.route([num_prompt_tokens], Caller(priority=priority, tenant=tenant))
        replica = self._router.load_of(route)
        return self._admission.predict_s([num_prompt_tokens], request_class, tenant, replica)

    def refused_since(self, time: float) -> list[RefusedRequests]:
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

    def _follow(self, config: ServingConfig) -> None:
        self.config = config
        self._dispatcher.reload(config)
        self.lifecycle.reload(config)
        self.metrics.classes.reload(config.request_classes)

    def _fail(self, error: LLMServingError) -> None:
        if self.failure is None:
            self.failure = error
            self.on_failure()
