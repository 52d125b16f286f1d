"""Answers given under load, computed once more alone and compared bit for bit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final
from zlib import crc32

from llm_serving.core.request import FinishReason, Request
from llm_serving.core.request_class import MAX_PRIORITY
from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import MAX_LOGPROBS
from llm_serving.core.timings import Clock
from llm_serving.engine.output_processor import OutputProcessor
from llm_serving.engine.sinks import SinkContext, receive
from llm_serving.log import get_logger
from llm_serving.observability.event_log import EventLog
from llm_serving.observability.metrics import Metrics
from llm_serving.scheduler import Scheduler
from llm_serving.text.tokenizer.tokenizer import Tokenizer

logger = get_logger(__name__)

MAX_WAITING: Final = 16
"""Answers that wait for an idle moment; newer ones replace older ones."""
MAX_BYTES: Final = 2**24
"""Of the pieces of an answer; a longer one is not audited: on a busy server `MAX_WAITING` of them are kept for long."""
TENANT: Final = "(audits)"
"""Of copies; the name of no API key."""
ANSWERED: Final = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(slots=True)
class Answer:
    """What was told of a request."""

    request: Request
    pieces: list[RequestOutput] = field(default_factory=list)
    num_bytes: int = 0
    """Of the pieces, about."""

    def add(self, piece: RequestOutput) -> None:
        self.pieces.append(piece)
        self.num_bytes += piece.num_bytes

    def tokens(self) -> list[str]:
        """Each token with its log-probabilities, of a search those of all its answers; their texts and ends come last.

        Before them comes what was told of the prompt, its vector last.

        Written down so that they differ wherever a bit does.
        """
        whole = join_pieces(self.pieces)
        parts = whole.beams or (whole,)
        told = [repr(each) for part in parts for each in part.logprobs or part.token_ids]
        if whole.vector is not None:
            told = [f"vector {crc32(whole.vector.tobytes()):08x}", *told]
        if (of_prompt := whole.prompt_logprobs) is not None:
            told = [
                repr(each) for each in zip(of_prompt.tokens(MAX_LOGPROBS), of_prompt.ranks.tolist(), strict=True)
            ] + told
        return [*told, repr([(crc32(part.text.encode()), part.finish_reason, part.stop_reason) for part in parts])]


class Auditor:
    """Chooses 1 in `every` requests; what its client was told is compared with the same request run alone, when idle.

    An answer depends on the request alone, so any difference is a fault of this server: `audit_mismatch_total` counts
    them. The copy is answered as its request was, at a desk of its own where nobody but the auditor is told. It finds
    nothing in the prefix cache: it must not lean on what it is to check. Whoever comes meanwhile goes before it, as it
    is of the lowest class; and it takes nothing of what the client's tenant may run.
    """

    def __init__(self, every: int, scheduler: Scheduler, tokenizer: Tokenizer, metrics: Metrics, clock: Clock) -> None:
        """Audits nothing with `every` 0."""
        self._every = every
        self._metrics = metrics
        self._desk = SinkContext(scheduler, OutputProcessor(tokenizer, None, EventLog(), clock), self._told_again)
        self._num_seen = 0
        self._watched: dict[str, Answer] = {}
        self._waiting: deque[Answer] = deque(maxlen=MAX_WAITING)
        self._running: tuple[Answer, Answer] | None = None
        """What was answered, and what its copy has been answered so far."""

    def started(self, request: Request) -> None:
        """A request of a client begins; perhaps it is chosen."""
        if self._every == 0:
            return
        self._num_seen += 1
        if self._num_seen % self._every == 0:
            self._watched[request.request_id] = Answer(request)

    def watches(self, request_id: str) -> bool:
        """Whether what its client is told is compared."""
        return request_id in self._watched

    def leave(self, request_id: str) -> Answer | None:
        """Another replica goes on with a request: what its client was told, where that is to be compared."""
        return self._watched.pop(request_id, None)

    def resume(self, request: Request, answer: Answer | None) -> None:
        """Goes on where another auditor was."""
        if answer is not None:
            answer.request = request
            self._watched[request.request_id] = answer

    def told(self, pieces: list[RequestOutput]) -> None:
        """Clients are told this."""
        if not self._watched:
            return
        for piece in pieces:
            answer = self._watched.get(piece.request_id)
            if answer is None:
                continue
            answer.add(piece)
            if piece.finished or answer.num_bytes > MAX_BYTES:
                del self._watched[piece.request_id]
            if piece.finish_reason in ANSWERED and answer.num_bytes <= MAX_BYTES:
                self._waiting.append(answer)

    def run_copy(self) -> None:
        """Nothing else runs: a copy begins, if there is something to audit."""
        if self._running is not None or not self._waiting:
            return
        answer = self._waiting.popleft()
        request = answer.request
        copy = Request(
            request_id=f"audit-{request.request_id}",
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            priority=MAX_PRIORITY,
            tenant=TENANT,
            cache_salt=request.request_id,
            beam_search=request.beam_search,
            constraint=request.constraint,
            wants_vector=answer.pieces[-1].vector is not None,
            arrival_time=request.arrival_time,
        )
        self._running = answer, Answer(copy)
        receive(copy, self._desk)

    def drop(self) -> None:
        """The copy, if one runs, ends without an answer: nothing can be said."""
        if self._running is not None:
            sink = self._running[1].request.sink
            assert sink is not None
            sink.finish(FinishReason.ABORT)

    def _told_again(self, piece: RequestOutput) -> None:
        """The copy's answer goes on; when it has come to its end, it is compared."""
        assert self._running is not None
        answer, again = self._running
        again.add(piece)
        if piece.finished:
            self._running = None
            if piece.finish_reason in ANSWERED:
                self._compare(answer, again)

    def _compare(self, answer: Answer, again: Answer) -> None:
        told, alone = answer.tokens(), again.tokens()
        self._metrics.audited(differs=told != alone)
        if told == alone:
            return
        index = next(index for index, pair in enumerate(zip(told, alone, strict=False)) if pair[0] != pair[1])
        logger.error(
            "audit: token %d of request %s differs from its answer given alone: %s instead of %s",
            index,
            answer.request.request_id,
            told[index],
            alone[index],
        )
