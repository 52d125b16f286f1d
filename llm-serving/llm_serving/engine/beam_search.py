"""Beam search: which sequences continue, and the output sink that runs each beam as a request."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from msgspec import structs

from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import BeamSearchParams
from llm_serving.core.step import Float32Array, StepOutput
from llm_serving.engine.output_processor import SinkContext


class LikelyTokens(NamedTuple):
    token_ids: Sequence[int]
    logprobs: Sequence[float]


NO_TOKENS: Final = LikelyTokens((), ())


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A sequence of generated tokens, as a linked list: its latest token and the sequence before it."""

    before: Hypothesis | None = None
    token_id: int = -1
    logprob: float = 0.0
    likely: LikelyTokens = NO_TOKENS
    length: int = 0
    cumulative_logprob: float = 0.0

    def followed_by(self, token_id: int, logprob: float, likely: LikelyTokens) -> Hypothesis:
        return Hypothesis(self, token_id, logprob, likely, self.length + 1, self.cumulative_logprob + logprob)

    def tokens(self) -> list[Hypothesis]:
        newest_first = []
        each = self
        while each.before is not None:
            newest_first.append(each)
            each = each.before
        return newest_first[::-1]


class FinishedBeam(NamedTuple):
    score: float
    hypothesis: Hypothesis
    finish_reason: FinishReason


class BeamSearch:
    """The beam search of one prompt.

    Each step continues every live sequence by its `2 * width` most likely tokens. A sequence that continues with a stop
    token is finished. Of the other continuations, the `width` most likely ones stay live. Equally likely ones keep the
    order of the sequences that they continue. Finished sequences are ranked by their score,
    `cumulative_logprob / length ** length_penalty`; the length includes the stop token. Live sequences finish at
    `max_tokens`.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, stop_token_ids: Collection[int]) -> None:
        self.live = [Hypothesis()]
        self._params = params
        self._max_tokens = max_tokens
        self._stop_token_ids = stop_token_ids
        self._finished: list[FinishedBeam] = []

    @property
    def has_ended(self) -> bool:
        return not self.live

    def advance(self, choices: Sequence[LikelyTokens]) -> list[int]:
        """Continue every live sequence by one token. Return, for each sequence that is then in `live`, the former index
        in `live` of the sequence that it continues. `choices`: for each live sequence, its most likely tokens in
        descending order, at least `2 * width` or the whole vocabulary.
        """
        width = self._params.width
        continued: list[tuple[int, Hypothesis]] = []
        for index, (beam, likely) in enumerate(zip(self.live, choices, strict=True)):
            pairs = zip(likely.token_ids[: 2 * width], likely.logprobs, strict=False)
            continued += ((index, beam.followed_by(token_id, logprob, likely)) for token_id, logprob in pairs)
        continued.sort(key=lambda each: -each[1].cumulative_logprob)
        for _, hypothesis in continued:
            if hypothesis.token_id in self._stop_token_ids:
                self._finish(hypothesis, FinishReason.STOP)
        surviving = [each for each in continued if each[1].token_id not in self._stop_token_ids][:width]
        self.live = [hypothesis for _, hypothesis in surviving]
        if self.live and self.live[0].length >= self._max_tokens:
            for hypothesis in self.live:
                self._finish(hypothesis, FinishReason.LENGTH)
            self.live = []
        if self._cannot_improve():
            self.live = []
        return [index for index, _ in surviving][: len(self.live)]

    def best(self) -> list[FinishedBeam]:
        return self._finished[: self._params.num_returned]

    def _finish(self, hypothesis: Hypothesis, reason: FinishReason) -> None:
        score = self._score(hypothesis.cumulative_logprob, hypothesis.length)
        insort(self._finished, FinishedBeam(score, hypothesis, reason), key=lambda each: -each.score)
        del self._finished[self._params.width :]

    def _cannot_improve(self) -> bool:
        if not self.live or len(self._finished) < self._params.width:
            return False
        return self._params.early_stopping or self._best_attainable() <= self._finished[-1].score

    def _best_attainable(self) -> float:
        most_likely = self.live[0]
        # The score is monotonic in the length, so its maximum is at the shortest or the longest length.
        lengths = (most_likely.length + 1, self._max_tokens)
        return max(self._score(most_likely.cumulative_logprob, length) for length in lengths)

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self._params.length_penalty)


class BeamSearchSink:
    """Output sink of a client's request for a beam search. The scheduler computes one request for each beam.

    A beam pauses after each token until the tokens of all beams have arrived. When all have arrived, the search chooses
    which continuations stay live. The first continuation of a beam stays in the beam's request. Further continuations
    become forks of that request, which share its blocks. A beam without a continuation finishes.
    """

    def __init__(self, request: Request, context: SinkContext) -> None:
        assert request.beam_search is not None
        self.request = request
        self._context = context
        self._params = request.beam_search
        self._search = BeamSearch(request.beam_search, request.sampling.max_tokens, request.stop_token_ids)
        self._beams: list[Request] = []
        self._candidates: dict[str, LikelyTokens] = {}
        self._num_forks = 0

    @property
    def active_requests(self) -> list[Request]:
        return self._beams

    def start(self) -> None:
        self._context.processor.start(self.request)
        self._context.scheduler.add(self._new_beam([]))

    def add_tokens(self, request: Request, samples: range, output: StepOutput) -> None:
        """Record the candidates of one beam. Once every beam has some, advance the search and emit an output."""
        if self.request.is_finished:  # by another beam of this step
            return
        (sample,) = samples  # beams have no draft tokens
        self._candidates[request.request_id] = LikelyTokens(*output.top.of(sample))
        if not request.is_finished:  # by its last token
            self._context.scheduler.pause(request)
        if len(self._candidates) < len(self._beams):
            return
        self._advance()
        processor = self._context.processor
        processor.record_token_time(self.request)
        self._context.emit(self._final_output() if self._search.has_ended else processor.pop_output(self.request))

    def add_prompt_result(
        self, request: Request, start: int, logprobs: PromptLogprobs | None, vector: Float32Array | None
    ) -> None:
        """Do nothing: a beam search reports no prompt results."""

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        if not self.request.is_finished:
            self._finish(reason)
            self._context.emit(self._context.processor.pop_output(self.request, error))

    def set_priority(self, priority: int) -> bool:
        scheduler = self._context.scheduler
        changed: list[Request] = []
        for beam in self._beams:
            if beam.is_finished:  # by its last token
                continue
            if not scheduler.set_priority(beam, priority):
                for each in changed:
                    scheduler.set_priority(each, self.request.priority)
                return False
            changed.append(beam)
        self.request.priority = priority
        return True

    def _finish(self, reason: FinishReason) -> None:
        for beam in self._beams:
            self._context.scheduler.finish(beam, FinishReason.ABORT)
        self._beams = []
        self.request.status, self.request.finish_reason = RequestStatus.FINISHED, reason

    def _advance(self) -> None:
        beams, candidates = self._beams, self._candidates
        self._beams, self._candidates = [], {}
        if self.request.first_scheduled_time is None:
            self.request.first_scheduled_time = beams[0].first_scheduled_time
            self.request.num_cached_tokens = beams[0].num_cached_tokens
        origins = self._search.advance([candidates[beam.request_id] for beam in beams])
        scheduler = self._context.scheduler
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
        """Create the request of a beam. `parent`: request of the beam that it continues, or None for the first beam."""
        root = self.request
        beam = Request.derived(
            root,
            request_id=f"{root.request_id}/{self._num_forks}",
            sampling=replace(
                root.sampling, logprobs=max(2 * self._params.width, root.sampling.logprobs or 0), prompt_logprobs=None
            ),
            stop_token_ids=frozenset(),
            beam_search=None,
            wants_vector=False,
            priority=root.priority,
            fork_of=None if parent is None else parent.request_id,
            needs_known_output=True,
            is_beam=True,
            sink=self,
            deadline=root.deadline,
            output_token_ids=output_token_ids,
        )
        if parent is not None:  # the fork continues the row of its parent: its gap since the last step is the same
            beam.last_scheduled_step = parent.last_scheduled_step
        self._num_forks += 1
        self._beams.append(beam)
        return beam

    def _final_output(self) -> RequestOutput:
        best = self._search.best()
        self._finish(best[0].finish_reason)
        self.request.output_token_ids = [token.token_id for token in best[0].hypothesis.tokens()]
        output = self._context.processor.pop_output(self.request)
        outputs = [self._answer(output, beam) for beam in best]
        return structs.replace(outputs[0], beams=tuple(outputs))

    def _answer(self, output: RequestOutput, beam: FinishedBeam) -> RequestOutput:
        root = self.request
        tokens = beam.hypothesis.tokens()
        token_ids = [token.token_id for token in tokens]
        stopped = beam.finish_reason is FinishReason.STOP
        count = root.sampling.logprobs
        return structs.replace(
            output,
            # The token that ended the text is not part of the text.
            text=self._context.processor.text_of(root, token_ids[:-1] if stopped else token_ids),
            token_ids=tuple(token_ids),
            logprobs=() if count is None else tuple(_token_logprobs(token, count) for token in tokens),
            num_output_tokens=len(token_ids),
            finish_reason=beam.finish_reason,
            stop_reason=token_ids[-1] if stopped and token_ids[-1] in root.sampling.stop_token_ids else None,
        )


def _token_logprobs(token: Hypothesis, count: int) -> TokenLogprobs:
    likely = token.likely
    return TokenLogprobs(token.token_id, token.logprob, tuple(likely.token_ids[:count]), tuple(likely.logprobs[:count]))
