"""Fakes of the engine and its streams for tests of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llm_serving.demo_model
import numpy as np
from llm_serving.config.schema import ServingConfig
from llm_serving.config.sections.model import ModelConfig
from llm_serving.config.sections.scheduler import SchedulerConfig
from llm_serving.config.sections.server import ServerConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.fingerprint import ComputeFingerprint
from llm_serving.core.request import Constraint, FinishReason
from llm_serving.core.request_class import ANONYMOUS, Caller
from llm_serving.core.request_output import FAILURES, PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.core.timings import HttpTimings
from llm_serving.engine.adapters import AdapterRegistry
from llm_serving.engine.async_engine import Admission
from llm_serving.engine.control import ReplicaView
from llm_serving.engine.lifecycle import ConfigReloader
from llm_serving.engine.replicas import EngineHealth
from llm_serving.engine.request_stream import CoalescedResponses, Sharing
from llm_serving.errors import CapacityError, LLMServingError, RequestError
from llm_serving.models.pooling import Pooling
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.latency_breakdown import Explanation
from llm_serving.observability.metrics import Metrics
from llm_serving.text.structured_output import ConstraintCompiler
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from msgspec.structs import replace
from numpy.typing import NDArray

DEMO_FOLDER = Path(llm_serving.demo_model.__file__).parent
DEMO_TOKENIZER = Tokenizer.load(DEMO_FOLDER)
DEMO_SPEC = ModelSpec.from_folder(DEMO_FOLDER)
DEMO_CONSTRAINTS = ConstraintCompiler(DEMO_TOKENIZER, frozenset(DEMO_TOKENIZER.eos_token_ids), DEMO_SPEC.vocab_size)
MAX_MODEL_LEN = 128


_NO_REPLICAS: Any = SimpleNamespace(reload=lambda config: {})


@dataclass(frozen=True)
class Piece:
    """Text of a step and its number of tokens."""

    text: str
    num_tokens: int = 1


@dataclass
class Script:
    """The pieces of an answer; `error` ends it."""

    pieces: Sequence[Piece] = (Piece("Hello"), Piece(" world"), Piece("", 1))
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None
    error: str | None = None
    hold_after: int | None = None
    """The stream waits for `FakeEngine.gate` before the piece with this index."""
    raises: BaseException | None = None
    """Exception raised in place of the last piece."""


@dataclass
class Submitted:
    prompt_token_ids: list[int]
    sampling: SamplingParams
    request_id: str
    priority: int
    tenant: str = ""
    cache_salt: str = ""
    fork_of: FakeStream | None = None
    beam_search: BeamSearchParams | None = None
    deadline: float | None = None
    source: str = ""
    wants_vector: bool = False
    constraint: Constraint | None = None


class FakeStream:
    def __init__(self, engine: FakeEngine, submitted: Submitted, script: Script) -> None:
        self.predicted_s = engine.predicted_s
        self._engine = engine
        self._submitted = submitted
        self._script = script
        self._next = 0
        self.finished = False
        self.latest: RequestOutput | None = None

    @property
    def request_id(self) -> str:
        return f"{self._submitted.request_id}-{self._engine.submitted.index(self._submitted)}"

    def __aiter__(self) -> FakeStream:
        return self

    def report_waiting(self, on_waiting: Callable[[int], None] | None) -> None:
        """Do nothing: no request waits."""

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        index, script = self._next, self._script
        self._next += 1
        if script.hold_after == index:
            self._engine.held.set()
            await self._engine.gate.wait()
        last = index == len(script.pieces) - 1
        if last and script.raises is not None:
            raise script.raises
        self.finished = last
        return self._output(index, last)

    async def aclose(self) -> None:
        if not self.finished:
            self.finished = True
            self._engine.aborted.append(self._submitted.request_id)

    @property
    def _failure(self) -> FinishReason:
        """Return the finish reason of a failure, whatever the script has for answers."""
        reason = self._script.finish_reason
        return reason if reason in FAILURES else FinishReason.ERROR

    def _output(self, index: int, last: bool) -> RequestOutput:
        script, sampling = self._script, self._submitted.sampling
        before = sum(piece.num_tokens for piece in script.pieces[:index])
        ids = tuple(range(500 + before, 500 + before + script.pieces[index].num_tokens))
        count = sampling.logprobs
        logprobs = () if count is None else tuple(_logprobs(token_id, count) for token_id in ids)
        failed = last and script.error is not None
        whole = RequestOutput(
            request_id=self._submitted.request_id,
            text=script.pieces[index].text,
            token_ids=ids,
            logprobs=logprobs,
            num_prompt_tokens=len(self._submitted.prompt_token_ids),
            num_cached_tokens=2,
            num_output_tokens=before + len(ids),
            finish_reason=(self._failure if failed else script.finish_reason) if last else None,
            stop_reason=script.stop_reason if last else None,
            error=script.error if failed else None,
            queued_s=0.25,
            prompt_logprobs=None if index else _of_prompt(self._submitted.prompt_token_ids, sampling.prompt_logprobs),
        )
        if last and self._submitted.wants_vector:
            whole.vector = self._engine.vector_of(self._submitted.prompt_token_ids)
        search = self._submitted.beam_search
        if search is None or not last or failed:
            return whole
        beams = tuple(replace(whole, text=f"beam {index}") for index in range(search.num_returned))
        return replace(whole, beams=beams)


def _of_prompt(token_ids: list[int], count: int | None) -> PromptLogprobs | None:
    """Return log-probability -i and rank i for token i of a prompt; the most likely tokens have the lowest ids."""
    numbers = np.arange(1, len(token_ids))
    if count is None or not len(numbers):
        return None
    likely = np.broadcast_to(np.arange(count), (len(numbers), count))
    return PromptLogprobs(
        np.array(token_ids[1:], np.int32),
        -numbers.astype(np.float32),
        numbers.astype(np.int32),
        likely.astype(np.int32),
        -0.25 - likely.astype(np.float32),
    )


def _logprobs(token_id: int, count: int) -> TokenLogprobs:
    ranks = range(count)
    return TokenLogprobs(token_id, -0.5, tuple(token_id + k for k in ranks), tuple(-0.5 - k for k in ranks))


class FakeLifecycle:
    """A lifecycle of a model that always serves."""

    gate = None
    level = 0
    can_replace_weights = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        yield

    def begin_shutdown(self) -> None:
        pass

    async def pause(self, running: str, new_requests: str) -> None:
        pass

    async def resume(self) -> None:
        pass

    async def sleep(self, level: int, running: str, new_requests: str) -> None:
        pass

    async def wake_up(self) -> None:
        pass


@dataclass
class FakeEngine:
    """An engine that answers every request with `script` and records its calls."""

    script: Script = field(default_factory=Script)
    model_name: str = "demo"
    script_for: Callable[[Submitted], Script] | None = None
    refusal: LLMServingError | None = None
    refuses_at_once: LLMServingError | None = None
    """Raised by `precheck_capacity`."""
    prechecks: list[list[int]] = field(default_factory=list)
    """Minimum prompt lengths of each call of `precheck_capacity`."""
    refuse_from: int = 0
    """Number of requests accepted before `refusal`."""
    max_body_bytes: int = 4096
    limits: dict[str, Any] = field(default_factory=dict)
    """Further keys of `serving_config`."""
    api_keys: tuple[ApiKey, ...] = ()
    ready: bool = True
    num_running: int = 3
    num_waiting: int = 2
    submitted: list[Submitted] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a stream waits for the gate."""
    explanations: list[Explanation] = field(default_factory=list)
    asked: list[tuple[object, str | None]] = field(default_factory=list)
    """Arguments and tenants of calls about explanations (request id) and timelines (number of steps)."""
    http_timings: list[HttpTimings | None] = field(default_factory=list)
    predicted_s: float | None = None
    """Predicted seconds to the first token."""
    failure: LLMServingError | None = None
    on_failure: Callable[[], None] = lambda: None
    num_starts: int = 0
    num_stops: int = 0

    def __post_init__(self) -> None:
        self.config = ServingConfig(
            model=ModelConfig(model_name=self.model_name, max_generate_length=MAX_MODEL_LEN, decode_batch_size=8),
            serving=ServerConfig(
                server_port=0, max_request_body_bytes=self.max_body_bytes, shutdown_timeout_s=10.0, **self.limits
            ),
            scheduler=SchedulerConfig(max_waiting_queue=20),
            api_keys=self.api_keys,
        )
        self.pooling = Pooling()
        self.model_spec = DEMO_SPEC
        self.tokenizer = DEMO_TOKENIZER
        self.sampling_defaults: dict[str, object] = {}
        self.metrics = Metrics("demo")
        self.reloading = ConfigReloader(self.config, _NO_REPLICAS, self.metrics)
        self.lifecycle = FakeLifecycle()
        self.max_model_len = MAX_MODEL_LEN
        self.coalesced = CoalescedResponses(2**20, 60.0, lambda: 0.0)
        self.adapters = AdapterRegistry(self.config, DEMO_SPEC)
        self.compute_fingerprint = ComputeFingerprint(kernels="program", instruction_set="plain")
        self.end_token_ids = frozenset({2})
        self.constraints = DEMO_CONSTRAINTS

    @property
    def control(self) -> FakeEngine:
        return self

    @property
    def lookup(self) -> FakeEngine:
        return self

    def start(self) -> None:
        self.num_starts += 1

    async def stop(self) -> None:
        self.num_stops += 1

    def share_tenants(self, other: FakeEngine) -> None:
        pass

    def health(self) -> EngineHealth:
        return EngineHealth(self.ready, "ready" if self.ready else "loading the model", loading=not self.ready)

    def clock(self) -> float:
        """Return a time that is a second later at each call."""
        self._ticks = getattr(self, "_ticks", 0.0) + 1.0
        return self._ticks

    def vector_of(self, prompt_token_ids: list[int]) -> NDArray[np.float32]:
        vector = np.random.default_rng(prompt_token_ids).normal(size=DEMO_SPEC.network.hidden)
        return vector.astype(np.float32)

    def explain(self, request_id: str, tenant: str | None = None) -> list[Explanation]:
        self.asked.append((request_id, tenant))
        return self.explanations

    def cancel(self, request_id: str, tenant: str | None = None) -> list[str]:
        self.asked.append((request_id, tenant))
        return [each.request_id for each in self.submitted if each.request_id == request_id]

    def replica_views(self) -> list[ReplicaView]:
        return [ReplicaView(0, "serving", self.num_running + self.num_waiting)]

    def drain(self, replica: int) -> None:
        raise RequestError("replica", "must not be the only replica that serves", replica)

    def join(self, replica: int) -> None:
        if replica:
            raise RequestError("replica", "must be an integer from 0 to 0", replica)

    async def scheduler_states(self) -> dict[int, None]:
        """Return no states: no replica answers in time."""
        return {0: None}

    async def snapshots(self, since: float, timeout_s: float) -> dict[int, None]:
        """Return no snapshots: no replica answers in time."""
        return {0: None}

    def timeline(self, num_steps: int, tenant: str | None = None) -> dict[str, object]:
        self.asked.append((num_steps, tenant))
        return {"traceEvents": [], "displayTimeUnit": "ms"}

    async def set_priority(self, request_id: str, priority: int, tenant: str | None = None) -> dict[str, bool]:
        self.asked.append((request_id, tenant))
        return {f"{request_id}-0": True}

    def check_capacity(self, prompt_lens: Sequence[int], caller: Caller = ANONYMOUS, num_each: int = 1) -> Admission:
        if self.num_waiting + len(prompt_lens) > self.config.scheduler.max_waiting_queue:
            raise FULL_QUEUE
        return Admission()

    def precheck_capacity(self, min_lens: Sequence[int], caller: Caller = ANONYMOUS) -> None:
        self.prechecks.append(list(min_lens))
        if self.refuses_at_once is not None:
            raise self.refuses_at_once

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        caller: Caller = ANONYMOUS,
        *,
        request_id: str,
        fork_of: FakeStream | None = None,
        beam_search: BeamSearchParams | None = None,
        constraint: Constraint | None = None,
        wants_vector: bool = False,
        admission: Admission | None = None,
        sharing: Sharing | None = None,
        has_siblings: bool = False,
    ) -> FakeStream:
        if self.refusal is not None and len(self.submitted) >= self.refuse_from:
            raise self.refusal
        submitted = Submitted(
            prompt_token_ids,
            sampling,
            request_id,
            caller.priority,
            caller.tenant,
            caller.cache_salt,
            fork_of,
            beam_search,
            caller.deadline,
            caller.source,
            wants_vector,
            constraint,
        )
        self.submitted.append(submitted)
        http_timings = caller.http_timings
        self.http_timings.append(http_timings)
        if http_timings is not None and http_timings.first_token_time is None:
            http_timings.first_token_time = self.clock()
        return FakeStream(self, submitted, self.script if self.script_for is None else self.script_for(submitted))


FULL_QUEUE = CapacityError("20 requests are waiting already", 3.2)
