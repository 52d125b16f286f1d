"""The answer of a simulated request: how many tokens it has got, and when; there is no text, and nobody reads it."""

from __future__ import annotations

from typing import Any, Final

from llm_serving.core.request import FINISHED, FinishReason, Request
from llm_serving.core.request_output import PromptLogprobs, RequestOutput
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.engine.sinks import Desk

from llm_serving_simulator.outcome import Outcome

_ONE_TOKEN: Final = (0,)


class CountedAnswer:
    """In place of `OneSequence`: a token that is neither the first nor the last is told by telling this object."""

    __slots__ = ("_desk", "_tell", "computed", "outcome", "request", "request_id")

    def __init__(self, request: Request, desk: Desk, outcome: Outcome) -> None:
        self.request, self.request_id = request, request.request_id
        self.computed = (request,)
        self.outcome = outcome
        self._desk: Any = desk
        self._tell: Any = desk.tell  # it is called for each token

    def begin(self) -> None:
        self._desk.scheduler.add(self.request)

    def take(self, request: Request, samples: range, output: StepOutput) -> None:
        if request.status is not FINISHED and len(request.output_token_ids) > 1:
            for _ in samples:
                self._tell(self)
            return
        for _ in samples[1:]:
            self._tell(self)
        self._tell(self._piece(_ONE_TOKEN))
        if request.is_finished:
            request.receiver = None

    def take_prompt(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        """Nothing is asked of prompts."""

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        request = self.request
        if request.receiver is None:
            return
        self._desk.scheduler.finish(request, reason)
        request.finish_reason, request.receiver = reason, None
        self._tell(self._piece((), error))

    def reprioritise(self, priority: int) -> bool:
        return bool(self._desk.scheduler.reprioritise(self.request, priority))

    def _piece(self, token_ids: tuple[int, ...], error: str | None = None) -> RequestOutput:
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            text="",
            token_ids=token_ids,
            logprobs=(),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=len(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=error,
        )


Told = RequestOutput | CountedAnswer
"""What an engine tells of an answer."""
