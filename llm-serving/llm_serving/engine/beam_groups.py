"""The beam searches of an engine: which requests are computed for each, and what they become after every reply."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llm_serving.core.request import FinishReason, Request, RequestStatus
from llm_serving.core.request_output import RequestOutput, TokenLogprobs
from llm_serving.core.step import StepOutput
from llm_serving.engine.beam_search import BeamSearch, FinishedBeam, Hypothesis, LikelyTokens
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.scheduler import Scheduler


@dataclass(slots=True)
class _Group:
    root: Request
    search: BeamSearch
    beams: list[Request]
    """One for each live sequence of the search, in its order."""
    replies: dict[str, LikelyTokens] = field(default_factory=dict)
    """What has come for the present step, by id of the beam."""
    num_forks: int = 0


class BeamGroups:
    """Computes a request with `beam_search` as a group of requests, one a beam.

    A beam that has got its reply is paused until all of its group have; then the search decides. The first continuation
    of a beam stays in its request, the others become forks of it, which share the blocks of what they have in common; a
    beam without continuation ends. The scheduler never sees the request they are computed for.
    """

    def __init__(self, scheduler: Scheduler, processor: OutputProcessor) -> None:
        self._scheduler = scheduler
        self._processor = processor
        self._groups: dict[str, _Group] = {}

    def start(self, root: Request) -> None:
        """Begins a search; `root` says what for."""
        assert root.beam_search is not None
        search = BeamSearch(root.beam_search, root.sampling.max_tokens, root.stop_token_ids)
        group = _Group(root, search, [])
        self._groups[root.request_id] = group
        self._scheduler.add(self._new_beam(group, []))

    def end(self, root: Request) -> None:
        """Ends a search and all that is computed for it; its blocks are free at once."""
        group = self._groups.pop(root.request_id)
        for beam in group.beams:
            self._scheduler.finish(beam, FinishReason.ABORT)
        root.status = RequestStatus.FINISHED

    def reprioritise(self, root: Request, priority: int) -> bool:
        """Gives all that is computed for a search another priority, or goes back; returns whether it has it now."""
        moved: list[Request] = []
        for beam in self._groups[root.request_id].beams:
            if beam.is_finished:  # by its last token
                continue
            if not self._scheduler.reprioritise(beam, priority):
                for each in moved:
                    self._scheduler.reprioritise(each, root.priority)
                return False
            moved.append(beam)
        root.priority = priority
        return True

    def take(self, beam: Request, sample: int, output: StepOutput) -> list[RequestOutput]:
        """Takes the reply for one beam; when it was the last of its group, the group makes a step.

        Returns:
            The group's piece after a step: an empty one, or at the end the last one with all answers.
        """
        root = beam.beam_of
        assert root is not None
        group = self._groups.get(root.request_id)
        if group is None:  # it ended within this step
            return []
        known = [token_id for token_id in output.top_token_ids[sample].tolist() if token_id >= 0]
        group.replies[beam.request_id] = LikelyTokens(known, output.top_logprobs[sample, : len(known)].tolist())
        if not beam.is_finished:  # by its last token
            self._scheduler.pause(beam)
        if len(group.replies) < len(group.beams):
            return []
        self._advance(group)
        self._processor.record_time(root)
        return [self._last_piece(group) if group.search.has_ended else self._processor.piece(root)]

    def _advance(self, group: _Group) -> None:
        beams, replies = group.beams, group.replies
        group.beams, group.replies = [], {}
        _describe(group.root, beams[0])
        origins = group.search.advance([replies[beam.request_id] for beam in beams])
        continued: set[int] = set()
        for origin, hypothesis in zip(origins, group.search.live, strict=True):
            beam = beams[origin]
            if origin in continued:
                self._scheduler.add(self._new_beam(group, [*beam.output_token_ids[:-1], hypothesis.token_id], beam))
            else:
                continued.add(origin)
                group.beams.append(beam)
                beam.output_token_ids[-1] = hypothesis.token_id
                self._scheduler.resume(beam)
        for index, beam in enumerate(beams):
            if index not in continued:
                self._scheduler.finish(beam, FinishReason.ABORT)

    def _new_beam(self, group: _Group, output_token_ids: list[int], parent: Request | None = None) -> Request:
        """A beam of the group; `parent` has computed all but its newest token."""
        root, search = group.root, group.root.beam_search
        assert search is not None
        beam = Request(
            request_id=f"{root.request_id}/{group.num_forks}",
            prompt_token_ids=root.prompt_token_ids,
            sampling=replace(root.sampling, logprobs=max(2 * search.width, root.sampling.logprobs or 0)),
            priority=root.priority,
            tenant=root.tenant,
            cache_salt=root.cache_salt,
            fork_of=None if parent is None else parent.request_id,
            waits_for_reply=True,
            beam_of=root,
            is_beam=True,
            arrival_time=root.arrival_time,
            deadline=root.deadline,
            output_token_ids=output_token_ids,
        )
        if parent is not None:  # it goes ahead of its class, as what its parent did was done for it too
            beam.last_scheduled_step = parent.last_scheduled_step
        group.num_forks += 1
        group.beams.append(beam)
        return beam

    def _last_piece(self, group: _Group) -> RequestOutput:
        root = group.root
        best = group.search.best()
        self.end(root)
        root.output_token_ids = [token.token_id for token in best[0].hypothesis.tokens()]
        root.finish_reason = best[0].finish_reason
        piece = self._processor.piece(root)
        outputs = [self._output(root, piece, beam) for beam in best]
        return replace(outputs[0], beams=tuple(outputs))

    def _output(self, root: Request, piece: RequestOutput, beam: FinishedBeam) -> RequestOutput:
        """One answer of the search as an output of its own."""
        tokens = beam.hypothesis.tokens()
        token_ids = [token.token_id for token in tokens]
        stopped = beam.finish_reason is FinishReason.STOP
        count = root.sampling.logprobs
        return replace(
            piece,
            # The token that ended the text is not part of it.
            text=self._processor.text_of(root, token_ids[:-1] if stopped else token_ids),
            token_ids=tuple(token_ids),
            logprobs=() if count is None else tuple(_token_logprobs(token, count) for token in tokens),
            num_output_tokens=len(token_ids),
            finish_reason=beam.finish_reason,
            stop_reason=token_ids[-1] if stopped and token_ids[-1] in root.sampling.stop_token_ids else None,
        )


def _describe(root: Request, beam: Request) -> None:
    """Lets the request tell what happened to its first beam when that began."""
    if root.first_scheduled_time is None:
        root.first_scheduled_time = beam.first_scheduled_time
        root.num_cached_tokens = beam.num_cached_tokens


def _token_logprobs(token: Hypothesis, count: int) -> TokenLogprobs:
    likely = token.likely
    return TokenLogprobs(token.token_id, token.logprob, tuple(likely.token_ids[:count]), tuple(likely.logprobs[:count]))
