"""From sampled tokens to the pieces a client gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.core.request import Request
from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.core.timings import Clock
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.text.tokenizer.detokenizer import SILENT, Detokenizer, IncrementalDetokenizer
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)


@dataclass(slots=True)
class ProducedOutput:
    """What a request has produced so far, and what of it has not been sent."""

    request: Request
    detokenizer: Detokenizer
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    num_results: int = 0
    """Tokens of the prompt behind which log-probabilities have come."""
    vector: Float32Array | None = None
    first_token_time: float | None = None
    last_token_time: float = 0.0


class OutputProcessor:
    """Keeps what each live request has produced and not yet sent."""

    def __init__(self, tokenizer: Tokenizer, metrics: Metrics | None, journal: EventLog, clock: Clock) -> None:
        """With `metrics` None nobody learns of its requests but who asks for their pieces."""
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._journal = journal
        self._clock = clock
        self._states: dict[str, ProducedOutput] = {}
        self._max_token_len = 0
        self._gaps: list[float] = []
        """Seconds between tokens, not yet told to the metrics."""

    def start(self, request: Request) -> None:
        self._states[request.request_id] = ProducedOutput(request, self._detokenizer(request))

    def leave(self, request: Request) -> ProducedOutput:
        """Another processor goes on with the request."""
        return self._states.pop(request.request_id)

    def resume(self, request: Request, produced: ProducedOutput) -> None:
        """Goes on where another processor was."""
        produced.request = request
        self._states[request.request_id] = produced

    def text_of(self, request: Request, output_token_ids: list[int]) -> str:
        """The text of a whole output of the request."""
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
        """Whether the request still waits for its last piece."""
        return request.request_id in self._states

    def find(self, request_id: str) -> Request | None:
        state = self._states.get(request_id)
        return None if state is None else state.request

    def unfinished(self) -> list[Request]:
        return [state.request for state in self._states.values()]

    def take(self, request: Request, sample: int, output: StepOutput) -> str | None:
        """Adds the token that `output` has for the request; returns the stop string it completed, if any."""
        state = self._states[request.request_id]
        token_id: int = output.token_ids.item(sample)
        state.token_ids += (token_id,)
        if request.sampling.logprobs is not None:
            top_ids, top_logprobs = output.top.of(sample)
            logprob = float(output.logprobs[sample])
            state.logprobs += (TokenLogprobs(token_id, logprob, tuple(top_ids), tuple(top_logprobs)),)
        self.record_time(request)
        # The end-of-sequence token ends the text; it is not part of it.
        if not (token_id in request.stop_token_ids and request.is_finished):
            state.text += state.detokenizer.add([token_id])
        return state.detokenizer.stop_string

    def take_prompt(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        """Takes what a step tells of a prompt, as `Receiver.take_prompt`, but for what an earlier one has told."""
        state = self._states[request.request_id]
        if logprobs is not None:
            assert start <= state.num_results, f"log-probabilities of {request.request_id} are missing"
            known = state.num_results - start
            if known < len(logprobs):
                state.prompt_logprobs.append(logprobs.starting_at(known))
                state.num_results = start + len(logprobs)
        if vector is not None:
            state.vector = vector

    def piece(self, request: Request, error: str | None = None, *, num_behind: int = 0) -> RequestOutput:
        """What has come since the last piece; of a finished request it is the last one.

        With `num_behind`, so many of its tokens are still to be taken: others follow.
        """
        state = self._states[request.request_id]
        ends = request.is_finished and not num_behind
        if ends:
            del self._states[request.request_id]
            state.text += state.detokenizer.flush()
            self._record_end(state)
            request.sink = None  # each refers to the other: they would stay until a search for such pairs
        first = request.first_scheduled_time
        piece = RequestOutput(
            request_id=request.request_id,
            text=state.text,
            token_ids=state.token_ids,
            logprobs=state.logprobs,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=len(request.output_token_ids) - num_behind,
            finish_reason=request.finish_reason if ends else None,
            stop_reason=request.stop_reason if ends else None,
            error=error,
            queued_s=0.0 if first is None else first - request.arrival_time,
        )
        if state.prompt_logprobs:
            piece.prompt_logprobs = PromptLogprobs.concatenate(state.prompt_logprobs)
            state.prompt_logprobs = []
        piece.vector = state.vector
        state.text, state.token_ids, state.logprobs = "", (), ()
        return piece

    def record_time(self, request: Request) -> None:
        """The request has got a token now."""
        if self._metrics is None:
            return
        state, now = self._states[request.request_id], self._clock()
        if state.first_token_time is None:
            state.first_token_time = now
            http_timings = request.http_timings
            if http_timings is not None and http_timings.first_token_time is None:
                http_timings.first_token_time = now
            self._journal.first_token(state.request, now)
            ttft_s = now - state.request.arrival_time
            self._metrics.first_token(ttft_s)
            self._metrics.classes.first_token(state.request.priority, ttft_s)
        else:
            self._gaps.append(now - state.last_token_time)
        state.last_token_time = now

    def report_times(self) -> None:
        """Tells the metrics what `record_time` has seen; once a step, as they are locked against scrapes."""
        if self._metrics is not None and self._gaps:
            self._metrics.inter_tokens(self._gaps)
            self._gaps = []

    def _record_end(self, state: ProducedOutput) -> None:
        if self._metrics is None:
            return
        request = state.request
        now = self._clock()
        self._journal.ended(request, now)
        scheduled = now if request.first_scheduled_time is None else request.first_scheduled_time
        assert request.finish_reason is not None
        num_output = len(request.output_token_ids)
        if num_output > self._max_token_len:
            self._max_token_len = num_output
            logger.info("{'max_token_len': %d}", num_output)  # the longest output so far; operators search for it
        self._metrics.prefix_cache(request.num_prompt_tokens, request.num_cached_tokens)
        e2e_s = now - request.arrival_time
        ttft_s = None if state.first_token_time is None else state.first_token_time - request.arrival_time
        tpot_s = None if ttft_s is None or num_output < 2 else (e2e_s - ttft_s) / (num_output - 1)
        self._metrics.classes.ended(request.priority, request.finish_reason, ttft_s, tpot_s, e2e_s)
        self._metrics.finished(
            request.finish_reason.value,
            e2e_s=e2e_s,
            ttft_s=ttft_s,
            num_prompt=request.num_prompt_tokens,
            num_output=num_output,
            queued_s=scheduled - request.arrival_time,
            decode_s=None if state.first_token_time is None else state.last_token_time - state.first_token_time,
        )
