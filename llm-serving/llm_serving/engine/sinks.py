"""Output sinks. A sink makes the answer to a client's request from the results of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from llm_serving.core.request import FINISHED, FinishReason, Request
from llm_serving.core.request_output import OutputSink, PromptLogprobs
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import Float32Array, Scores, StepOutput
from llm_serving.engine.beam_search import BeamSearchSink
from llm_serving.engine.output_processor import SinkContext
from llm_serving.scheduler import Schedule

__all__ = ["OUTPUT_SINKS", "SequenceSink", "SinkContext", "attach_sink", "deliver", "finish"]


class SequenceSink:
    """The sink of a request with one sequence. A stop string in the text finishes the request."""

    __slots__ = ("_context", "active_requests", "request")

    def __init__(self, request: Request, context: SinkContext) -> None:
        self.request = request
        self.active_requests: tuple[Request, ...] = (request,)
        self._context = context

    def start(self) -> None:
        self._context.processor.start(self.request)
        self._context.scheduler.add(self.request)

    def resume(self) -> None:
        self._context.scheduler.add(self.request)

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        context, num_pending = self._context, len(samples)
        processor = context.processor
        for sample in samples:
            num_pending -= 1
            piece = processor.add_token(request, sample, output, num_pending)
            if piece.stop_reason is not None:
                self._finish(FinishReason.STOP, piece.stop_reason)
                del request.output_token_ids[len(request.output_token_ids) - num_pending :]
                request.num_new_tokens -= num_pending
                num_pending = 0
            if not num_pending and request.status is FINISHED:
                processor.complete(request, piece)
            context.emit(piece)
            if not num_pending:
                break

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        context = self._context
        if not context.processor.knows(request):
            return
        context.processor.add_prompt_result(request, start, logprobs, vector)
        if request.is_finished and request.sampling.max_tokens == 0:  # with output tokens, `add_tokens` emits
            context.emit(context.processor.pop_output(request))

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        processor = self._context.processor
        if processor.knows(self.request):
            self._finish(reason)
            self._context.emit(processor.pop_output(self.request, error))

    def set_priority(self, priority: int) -> bool:
        return self._context.scheduler.set_priority(self.request, priority)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Finish the request with this reason, even if its latest token has finished it for another reason."""
        self._context.scheduler.finish(self.request, reason)
        self.request.finish_reason, self.request.stop_reason = reason, stop_reason


OUTPUT_SINKS: Final[dict[type, Callable[[Request, SinkContext], OutputSink]]] = {
    type(None): SequenceSink,
    BeamSearchParams: BeamSearchSink,
}


def attach_sink(request: Request, context: SinkContext) -> None:
    """Create the output sink of a client's request. The sink adds the request or its first beam to the scheduler."""
    request.sink = OUTPUT_SINKS[type(request.beam_search)](request, context)
    request.sink.start()


def finish(request: Request, reason: FinishReason, error: str | None = None) -> None:
    """Finish a request or, if it is a beam, its whole beam search. Do nothing if it has already finished."""
    if request.sink is not None:
        request.sink.finish(reason, error)


def deliver(schedule: Schedule, updated: list[Request], output: StepOutput) -> None:
    """Pass each result of a step to the sink of its request. `updated`: requests that got a token in the step, or
    finished without output tokens.
    """
    failed = _deliver_prompt_results(schedule, output) if schedule.prompt_results else set()
    all_are_live = len(updated) == len(schedule.rows) and not failed  # the usual case: no set of many requests is built
    live = set() if all_are_live else set(updated) - failed
    stop, row_errors = 0, output.row_errors
    for request, _, _, num_samples, _ in schedule.rows:
        start, stop = stop, stop + num_samples
        if not num_samples or not (all_are_live or request in live):
            continue
        sink = request.sink
        if sink is None:
            continue
        if start in row_errors:
            sink.finish(FinishReason.ERROR, row_errors[start])
        else:
            sink.add_tokens(request, range(start, start + request.num_new_tokens), output)


def _deliver_prompt_results(schedule: Schedule, output: StepOutput) -> set[Request]:
    num_samples, num_scores = len(output.token_ids), output.scores.top.num_results
    score = vector = 0
    failed = set()
    for row, start, end, wants_vector, _ in schedule.prompt_results:
        request = schedule.rows[row].request
        scores = range(score, score + end - start)
        vectors = range(vector, vector + wants_vector)
        score, vector = scores.stop, vectors.stop
        sink = request.sink
        if sink is None:
            continue
        results = (*(num_samples + each for each in scores), *(num_samples + num_scores + each for each in vectors))
        error = next((output.row_errors[each] for each in results if each in output.row_errors), None)
        if error is not None:
            sink.finish(FinishReason.ERROR, error)
            failed.add(request)
            continue
        token_ids = request.prompt_token_ids[start + 1 : end + 1]
        sink.add_prompt_result(
            request,
            start,
            _prompt_logprobs(token_ids, output.scores, scores) if scores else None,
            output.vectors[vectors.start] if vectors else None,
        )
    return failed


def _prompt_logprobs(token_ids: list[int], scores: Scores, results: range) -> PromptLogprobs:
    part = slice(results.start, results.stop)
    first, last = scores.top.offsets[[results.start, results.stop]].tolist()
    shape = len(results), (last - first) // len(results)
    return PromptLogprobs(
        np.array(token_ids, np.int32),
        scores.logprobs[part],
        scores.ranks[part],
        scores.top.token_ids[first:last].reshape(shape),
        scores.top.logprobs[first:last].reshape(shape),
    )
