"""Answers given under load, computed once more alone and compared bit for bit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.step import StepOutput
from llm_serving.engine.metrics import Metrics
from llm_serving.log import get_logger

logger = get_logger(__name__)

MAX_WAITING: Final = 16
"""Answers that wait for an idle moment; newer ones replace older ones."""


@dataclass(slots=True)
class _Answer:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, sample: int, output: StepOutput) -> None:
        self.token_ids.append(int(output.token_ids[sample]))
        self.logprobs.append(float(output.logprobs[sample]))

    def first_difference(self, other: _Answer) -> int | None:
        """Index of the first token that differs in itself or, where asked for, in the bits of its log-probability."""
        shared = min(len(self.token_ids), len(other.token_ids))
        with_logprobs = self.request.sampling.logprobs is not None
        for index in range(shared):
            if self.token_ids[index] != other.token_ids[index]:
                return index
            ours, theirs = np.float32(self.logprobs[index]), np.float32(other.logprobs[index])
            if with_logprobs and ours.tobytes() != theirs.tobytes():
                return index
        return None if len(self.token_ids) == len(other.token_ids) else shared


class Auditor:
    """Chooses 1 in `every` requests; what it was answered is compared with the same request run alone, when idle.

    An answer depends on the request alone, so any difference is a fault of this server: `audit_mismatch_total` counts
    them. The copy finds nothing in the prefix cache: it must not lean on what it is to check.
    """

    def __init__(self, every: int, metrics: Metrics) -> None:
        """Audits nothing with `every` 0."""
        self._every = every
        self._metrics = metrics
        self._num_seen = 0
        self._watched: dict[str, _Answer] = {}
        self._waiting: deque[_Answer] = deque(maxlen=MAX_WAITING)
        self._running: tuple[_Answer, _Answer] | None = None
        """What was answered, and what its copy has been answered so far."""

    def started(self, request: Request) -> None:
        """A request of a client begins; perhaps it is chosen."""
        if self._every == 0 or request.beam_search is not None:
            return
        self._num_seen += 1
        if self._num_seen % self._every == 0:
            self._watched[request.request_id] = _Answer(request)

    def take(self, request: Request, sample: int, output: StepOutput) -> None:
        """The request got a token."""
        answer = self._watched.get(request.request_id)
        if answer is not None:
            answer.take(sample, output)

    def ended(self, request: Request) -> None:
        answer = self._watched.pop(request.request_id, None)
        if answer is not None and request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._waiting.append(answer)

    def next_copy(self) -> Request | None:
        """A copy to be run now that nothing else is; None if there is nothing to audit."""
        if self._running is not None or not self._waiting:
            return None
        answer = self._waiting.popleft()
        request = answer.request
        # It ends where the answer ended, whether that was a stop string, a limit or a token.
        max_tokens = len(answer.token_ids)
        copy = Request(
            request_id=f"audit-{request.request_id}",
            prompt_token_ids=request.prompt_token_ids,
            sampling=replace(
                request.sampling, max_tokens=max_tokens, min_tokens=min(request.sampling.min_tokens, max_tokens)
            ),
            stop_token_ids=request.stop_token_ids,
            priority=request.priority,
            tenant=request.tenant,
            cache_salt=f"audit {self._num_seen} {request.cache_salt}",
            arrival_time=request.arrival_time,
        )
        self._running = answer, _Answer(copy)
        return copy

    @property
    def copy(self) -> Request | None:
        """The one that runs."""
        return None if self._running is None else self._running[1].request

    def owns(self, request: Request) -> bool:
        return self.copy is request

    def check(self, request: Request, sample: int, output: StepOutput) -> None:
        """The copy got a token; when it has ended, its answer is compared."""
        assert self._running is not None
        answer, again = self._running
        again.take(sample, output)
        if request.is_finished:
            self._running = None
            index = again.first_difference(answer)
            self._metrics.audited(differs=index is not None)
            if index is not None:
                logger.error(
                    "audit: token %d of request %s differs from its answer given alone: %s instead of %s",
                    index,
                    answer.request.request_id,
                    answer.token_ids[index : index + 4],
                    again.token_ids[index : index + 4],
                )

    def drop(self) -> None:
        """The copy ends without an answer: nothing can be said."""
        self._running = None
