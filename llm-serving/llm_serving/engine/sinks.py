"""Output sinks: what turns the tokens of one or several requests into the response of a client.

`SequenceSink` serves a single sequence, `BeamSearchSink` a beam search; `OUTPUT_SINKS` maps the type of
`Request.beam_search` to its sink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.core.request_output import OutputSink, PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.engine.beam_search import BeamSearch, FinishedBeam, Hypothesis, LikelyTokens
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SinkContext:
    """What receivers share: those who compute, those who make text of tokens, those who are told."""

    scheduler: Scheduler
    processor: OutputProcessor
    tell: Callable[[RequestOutput], None]
    """Gets every piece of every answer."""


class SequenceSink:
    """Answers a request by what is computed for it; a stop string found in the text ends it."""

    def __init__(self, request: Request, desk: SinkContext) -> None:
        self.request = request
        self.active_requests = (request,)
        self._desk = desk

    def start(self) -> None:
        self._desk.processor.start(self.request)
        self._desk.scheduler.add(self.request)

    def resume(self) -> None:
        """Begins with what another replica has begun; the processor knows how far that came."""
        self._desk.scheduler.add(self.request)

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
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

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        desk = self._desk
        if not desk.processor.knows(request):
            return
        desk.processor.take_prompt(request, start, logprobs, vector)
        if request.is_finished and request.sampling.max_tokens == 0:  # otherwise its last token is still to be told
            desk.tell(desk.processor.piece(request))

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        processor = self._desk.processor
        if processor.knows(self.request):
            self._finish(reason)
            self._desk.tell(processor.piece(self.request, error))

    def set_priority(self, priority: int) -> bool:
        return self._desk.scheduler.set_priority(self.request, priority)

    def _finish(self, reason: FinishReason, stop_reason: str | None = None) -> None:
        """For this reason, whatever limit its newest token reached."""
        self._desk.scheduler.finish(self.request, reason)
        self.request.finish_reason, self.request.stop_reason = reason, stop_reason


class BeamSearchSink:
    """Computes a request whose form is `BeamSearchParams` as a group of requests, one a beam.

    A beam that has got its reply is paused until all of its group have; then the search decides. The first continuation
    of a beam stays in its request, the others become forks of it, which share the blocks of what they have in common; a
    beam without continuation ends. The scheduler never sees the request they are computed for.
    """

    def __init__(self, request: Request, desk: SinkContext) -> None:
        assert request.beam_search is not None
        self.request = request
        self._desk = desk
        self._params = request.beam_search
        self._search = BeamSearch(request.beam_search, request.sampling.max_tokens, request.stop_token_ids)
        self._beams: list[Request] = []
        """One for each live sequence of the search, in its order."""
        self._replies: dict[str, LikelyTokens] = {}
        """What has come for the present step, by id of the beam."""
        self._num_forks = 0

    @property
    def active_requests(self) -> list[Request]:
        return self._beams

    def start(self) -> None:
        self._desk.processor.start(self.request)
        self._desk.scheduler.add(self._new_beam([]))

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        """Takes the reply for one beam; when it was the last of its group, the group makes a step.

        After a step it tells a piece: an empty one, or at the end the last one with all answers.
        """
        if self.request.is_finished:  # within this step
            return
        (sample,) = samples  # beams have no draft tokens
        self._replies[request.request_id] = LikelyTokens(*output.top.of(sample))
        if not request.is_finished:  # by its last token
            self._desk.scheduler.pause(request)
        if len(self._replies) < len(self._beams):
            return
        self._advance()
        processor = self._desk.processor
        processor.record_time(self.request)
        self._desk.tell(self._last_piece() if self._search.has_ended else processor.piece(self.request))

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        """Nothing is told of the prompt of a search."""

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        if not self.request.is_finished:
            self._finish(reason)
            self._desk.tell(self._desk.processor.piece(self.request, error))

    def set_priority(self, priority: int) -> bool:
        scheduler = self._desk.scheduler
        moved: list[Request] = []
        for beam in self._beams:
            if beam.is_finished:  # by its last token
                continue
            if not scheduler.set_priority(beam, priority):
                for each in moved:
                    scheduler.set_priority(each, self.request.priority)
                return False
            moved.append(beam)
        self.request.priority = priority
        return True

    def _finish(self, reason: FinishReason) -> None:
        for beam in self._beams:
            self._desk.scheduler.finish(beam, FinishReason.ABORT)
        self._beams = []
        self.request.status, self.request.finish_reason = RequestStatus.FINISHED, reason

    def _advance(self) -> None:
        beams, replies = self._beams, self._replies
        self._beams, self._replies = [], {}
        self._describe(beams[0])
        origins = self._search.advance([replies[beam.request_id] for beam in beams])
        scheduler = self._desk.scheduler
        continued: set[int] = set()
        for origin, hypothesis in zip(origins, self._search.live, strict=True):
            beam = beams[origin]
            if origin in continued:
                scheduler.add(self._new_beam([*beam.output_token_ids[:-1], hypothesis.token_id], beam))
            else:
                continued.add(origin)
                self._beams.append(beam)
                beam.output_token_ids[-1] = hypothesis.token_id
                scheduler.resume(beam)
        for index, beam in enumerate(beams):
            if index not in continued:
                scheduler.finish(beam, FinishReason.ABORT)

    def _new_beam(self, output_token_ids: list[int], parent: Request | None = None) -> Request:
        """A beam of the group; `parent` has computed all but its newest token."""
        root = self.request
        beam = Request(
            request_id=f"{root.request_id}/{self._num_forks}",
            prompt_token_ids=root.prompt_token_ids,
            sampling=replace(
                root.sampling, logprobs=max(2 * self._params.width, root.sampling.logprobs or 0), prompt_logprobs=None
            ),
            priority=root.priority,
            tenant=root.tenant,
            cache_salt=root.cache_salt,
            fork_of=None if parent is None else parent.request_id,
            needs_known_output=True,
            is_beam=True,
            sink=self,
            arrival_time=root.arrival_time,
            deadline=root.deadline,
            output_token_ids=output_token_ids,
        )
        if parent is not None:  # it goes ahead of its class, as what its parent did was done for it too
            beam.last_scheduled_step = parent.last_scheduled_step
        self._num_forks += 1
        self._beams.append(beam)
        return beam

    def _describe(self, beam: Request) -> None:
        """Lets the request tell what happened to its first beam when that began."""
        if self.request.first_scheduled_time is None:
            self.request.first_scheduled_time = beam.first_scheduled_time
            self.request.num_cached_tokens = beam.num_cached_tokens

    def _last_piece(self) -> RequestOutput:
        best = self._search.best()
        self._finish(best[0].finish_reason)
        self.request.output_token_ids = [token.token_id for token in best[0].hypothesis.tokens()]
        piece = self._desk.processor.piece(self.request)
        outputs = [self._output(piece, beam) for beam in best]
        return replace(outputs[0], beams=tuple(outputs))

    def _output(self, piece: RequestOutput, beam: FinishedBeam) -> RequestOutput:
        """One answer of the search as an output of its own."""
        root = self.request
        tokens = beam.hypothesis.tokens()
        token_ids = [token.token_id for token in tokens]
        stopped = beam.finish_reason is FinishReason.STOP
        count = root.sampling.logprobs
        return replace(
            piece,
            # The token that ended the text is not part of it.
            text=self._desk.processor.text_of(root, token_ids[:-1] if stopped else token_ids),
            token_ids=tuple(token_ids),
            logprobs=() if count is None else tuple(_token_logprobs(token, count) for token in tokens),
            num_output_tokens=len(token_ids),
            finish_reason=beam.finish_reason,
            stop_reason=token_ids[-1] if stopped and token_ids[-1] in root.sampling.stop_token_ids else None,
        )


def _token_logprobs(token: Hypothesis, count: int) -> TokenLogprobs:
    likely = token.likely
    return TokenLogprobs(token.token_id, token.logprob, tuple(likely.token_ids[:count]), tuple(likely.logprobs[:count]))


__all__ = ["OUTPUT_SINKS", "SequenceSink", "SinkContext", "receive"]


class _Create(Protocol):
    def __call__(self, request: Request, desk: SinkContext) -> OutputSink: ...


OUTPUT_SINKS: Final[dict[type, _Create]] = {
    type(None): SequenceSink,
    BeamSearchParams: BeamSearchSink,
}


def receive(request: Request, desk: SinkContext) -> OutputSink:
    """Gives a request who answers it, and begins."""
    sink = request.sink = OUTPUT_SINKS[type(request.beam_search)](request, desk)
    sink.start()
    return sink
