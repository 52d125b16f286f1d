"""The usual answer: the tokens of the request itself, as they come."""

from __future__ import annotations

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_output import PromptLogprobs
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.engine.receivers.desk import Desk


class OneSequence:
    """Answers a request by what is computed for it; a stop string found in the text ends it."""

    def __init__(self, request: Request, desk: Desk) -> None:
        self.request = request
        self.computed = (request,)
        self._desk = desk

    def begin(self) -> None:
        self._desk.processor.start(self.request)
        self._desk.scheduler.add(self.request)

    def resume(self) -> None:
        """Begins with what another replica has begun; the processor knows how far that came."""
        self._desk.scheduler.add(self.request)

    def take(self, request: Request, samples: range, output: StepOutput) -> None:
        desk = self._desk
        for sample in samples:
            stop_string = desk.processor.take(request, sample, output)
            num_behind = samples.stop - sample - 1
            if stop_string is not None:
                self._finish(FinishReason.STOP, stop_string)
                del request.output_token_ids[len(request.output_token_ids) - num_behind :]
                request.num_new_tokens -= num_behind
                num_behind = 0
            desk.tell(desk.processor.piece(request, num_behind=num_behind))
            if not num_behind:
                break
        if request.is_finished:
            desk.note_length(request)

    def take_prompt(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        desk = self._desk
        if not desk.processor.knows(request):
            return
        desk.processor.take_prompt(request, start, logprobs, vector)
        if request.is_finished and request.sampling.max_tokens == 0:  # otherwise its last token is still to be told
            desk.tell(desk.processor.piece(request))

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        processor = self._desk.processor
        if processor.knows(self.request):
            self._finish(reason)
            self._desk.tell(processor.piece(self.request, error))

    def reprioritise(self, priority: int) -> bool:
        return self._desk.scheduler.reprioritise(self.request, priority)

    def _finish(self, reason: FinishReason, stop_reason: str | None = None) -> None:
        """For this reason, whatever limit its newest token reached."""
        self._desk.scheduler.finish(self.request, reason)
        self.request.finish_reason, self.request.stop_reason = reason, stop_reason
