"""Converts sampled tokens into the outputs that a client gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llm_serving.core.request import FINISHED, Request
from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.core.timings import Clock
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Scheduler
from llm_serving.text.tokenizer.detokenizer import SILENT, Detokenizer, IncrementalDetokenizer
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)


@dataclass(slots=True)
class ProducedOutput:
    request: Request
    detokenizer: Detokenizer
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    num_results: int = 0
    vector: Float32Array | None = None
    first_token_time: float | None = None
    last_token_time: float = 0.0


class OutputProcessor:
    """Makes outputs from the sampled tokens of requests. Without `metrics`, it records neither metrics nor events."""

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics | None, event_log: EventLog, clock: Clock) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._event_log = event_log
        self._clock = clock
        self._states: dict[str, ProducedOutput] = {}
        self._max_token_len = 0
        self._gaps: list[float] = []
        self._now: float | None = None
        """Time of the tokens that were added since the last call of `flush_token_gaps`."""

    def start(self, request: Request) -> None:
        self._states[request.request_id] = ProducedOutput(request, self._detokenizer(request))

    def leave(self, request: Request) -> ProducedOutput:
        return self._states.pop(request.request_id)

    def resume(self, request: Request, produced: ProducedOutput) -> None:
        produced.request = request
        self._states[request.request_id] = produced

    def text_of(self, request: Request, output_token_ids: list[int]) -> str:
        detokenizer = self._detokenizer(request)
        return detokenizer.add(output_token_ids) + detokenizer.flush()

    def _detokenizer(self, request: Request) -> Detokenizer:
        if not request.sampling.detokenize:
            return SILENT
        return IncrementalDetokenizer(
            self._tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            stop=request.sampling.stop,
            include_stop_str_in_output=request.sampling.include_stop_str_in_output,
            skip_special_tokens=request.sampling.skip_special_tokens,
        )

    def knows(self, request: Request) -> bool:
        """Return whether the final output of the request is still unsent."""
        return request.request_id in self._states

    def find(self, request_id: str) -> Request | None:
        state = self._states.get(request_id)
        return None if state is None else state.request

    def unfinished(self) -> list[Request]:
        return [state.request for state in self._states.values()]

    def add_token(self, request: Request, sample: int, output: StepOutput, num_pending: int) -> RequestOutput:
        """Return the output of a sampled token, with index `sample` in `output`. Its `stop_reason` is the stop string
        that the token completes, if any. `num_pending`: number of later tokens that the request already has.
        """
        state = self._states[request.request_id]
        token_id: int = output.token_ids.item(sample)
        self._record_token_time(state)
        text, detokenizer = "", state.detokenizer
        # A stop token is not part of the text.
        if not (token_id in request.stop_token_ids and request.status is FINISHED):
            text = detokenizer.add_token(token_id)
        piece = _new_output(state, request, text, (token_id,), num_pending)
        piece.stop_reason = detokenizer.stop_string
        if request.sampling.logprobs is not None:
            top_ids, top_logprobs = output.top.of(sample)
            logprob = float(output.logprobs[sample])
            piece.logprobs = (TokenLogprobs(token_id, logprob, tuple(top_ids), tuple(top_logprobs)),)
        return piece

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        state = self._states[request.request_id]
        if logprobs is not None:
            assert start <= state.num_results, f"log-probabilities of {request.request_id} are missing"
            known = state.num_results - start
            if known < len(logprobs):
                state.prompt_logprobs.append(logprobs.starting_at(known))
                state.num_results = start + len(logprobs)
        if vector is not None:
            state.vector = vector

    def pop_output(self, request: Request, error: str | None = None) -> RequestOutput:
        """Return an output without tokens, for example with a prompt's vector. It is final if the request has ended."""
        piece = _new_output(self._states[request.request_id], request)
        if request.status is FINISHED:
            self.complete(request, piece, error)
        return piece

    def complete(self, request: Request, piece: RequestOutput, error: str | None = None) -> None:
        """Make `piece` the final output of a request that has finished."""
        piece.finish_reason, piece.stop_reason, piece.error = request.finish_reason, request.stop_reason, error
        state = self._states.pop(request.request_id)
        piece.text += state.detokenizer.flush()
        request.sink = None  # breaks a reference cycle, which would stay in memory until a garbage collection
        if self._metrics is None:
            return
        now = self._clock()
        self._event_log.ended(request, now)
        arrived, first_token = request.arrival_time, state.first_token_time
        scheduled = now if request.first_scheduled_time is None else request.first_scheduled_time
        assert request.finish_reason is not None
        num_output = len(request.output_token_ids)
        if num_output > self._max_token_len:
            self._max_token_len = num_output
            logger.info("{'max_token_len': %d}", num_output)  # operators search the log for the longest output
        self._metrics.record_finished(
            request.finish_reason,
            e2e_s=now - arrived,
            ttft_s=None if first_token is None else first_token - arrived,
            num_prompt=request.num_prompt_tokens,
            num_output=num_output,
            queued_s=scheduled - arrived,
            decode_s=None if first_token is None else state.last_token_time - first_token,
            num_cached=request.num_cached_tokens,
            priority=request.priority,
        )

    def record_token_time(self, request: Request) -> None:
        self._record_token_time(self._states[request.request_id])

    def _record_token_time(self, state: ProducedOutput) -> None:
        if self._metrics is None:
            return
        now = self._now
        if now is None:
            now = self._now = self._clock()
        if state.first_token_time is not None:
            self._gaps.append(now - state.last_token_time)
            state.last_token_time = now
            return
        state.first_token_time = state.last_token_time = now
        request = state.request
        http_timings = request.http_timings
        if http_timings is not None and http_timings.first_token_time is None:
            http_timings.first_token_time = now
        self._event_log.first_token(request, now)
        self._metrics.record_first_token(now - request.arrival_time, request.priority)

    def flush_token_gaps(self) -> None:
        """Add the collected times between tokens to the metrics. Called once a step, because each call takes a lock."""
        self._now = None
        if self._metrics is not None and self._gaps:
            self._metrics.record_inter_tokens(self._gaps)
            self._gaps = []


def _new_output(
    state: ProducedOutput, request: Request, text: str = "", token_ids: tuple[int, ...] = (), num_pending: int = 0
) -> RequestOutput:
    first = request.first_scheduled_time
    piece = RequestOutput(
        request.request_id,
        text,
        token_ids,
        (),
        len(request.prompt_token_ids),
        request.num_cached_tokens,
        len(request.output_token_ids) - num_pending,
        queued_s=0.0 if first is None else first - request.arrival_time,
        vector=state.vector,
    )
    if state.prompt_logprobs:
        piece.prompt_logprobs = PromptLogprobs.concatenate(state.prompt_logprobs)
        state.prompt_logprobs = []
    return piece


@dataclass(frozen=True, slots=True)
class SinkContext:
    scheduler: Scheduler
    processor: OutputProcessor
    emit: Callable[[RequestOutput], None]
